"""What PyInstaller starts from."""

from kvstream.cli import main

main(prog_name="kvstream")
