from fednmap.cli import main

main()
