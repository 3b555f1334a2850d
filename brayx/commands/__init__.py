"""The commands of `brayx`, a file each; `brayx.commands.cli` finds them."""
