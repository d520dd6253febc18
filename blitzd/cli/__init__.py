"""The `blitzd` executable. One file a command group, imported only when it runs.

Exit codes: 0 done, 1 failed, 2 usage.
"""

import cyclopts

import blitzd

app = cyclopts.App(name="blitzd", help=blitzd.__doc__, version=blitzd.__version__)

app.command("blitzd.cli.serve:up", name="up")
app.command("blitzd.cli.worker:worker", name="worker")
app.command("blitzd.cli.model:app", name="model")
app.command("blitzd.cli.log:app", name="log")
app.command("blitzd.cli.replay:replay", name="replay")
app.command("blitzd.cli.sim:app", name="sim")


def main() -> None:
    app()
