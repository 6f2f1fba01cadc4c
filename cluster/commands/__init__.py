"""One module per subcommand: `run(arguments) -> exit code`.

Options, summaries and examples are in cluster/cli_options.py and cluster/cli_commands.py, which
need the standard library alone. cluster/cli.py imports only the module that was asked for.
"""
