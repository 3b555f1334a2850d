"""Learning algorithms, one file each; torch only."""
