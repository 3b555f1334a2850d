"""The commands of `brayx`, a file each."""
