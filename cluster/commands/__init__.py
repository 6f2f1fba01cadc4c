"""One module per subcommand: `SUMMARY`, `add_arguments(parser)`, `run(arguments) -> exit code`.

cluster/cli.py imports only the one that was asked for, so that each starts at once.
"""
