"""The `blitzd` executable. One file a command group, imported only when it runs.

Exit codes: 0 done, 1 failed, 2 usage.
"""

import sys

import cyclopts

import blitzd

app = cyclopts.App(name="blitzd", help=blitzd.__doc__, version=blitzd.__version__)

for name, where, text in (
    ("up", "serve:up", "Serve a model with prefill and decode in processes of their own."),
    ("serve", "serve:serve", "The node daemon: settings from a file."),
    ("status", "status:status", "Replicas, queue, drains and trouble of a running daemon."),
    ("scale", "verbs:scale", "How many replicas of each role there are to be."),
    ("drain", "verbs:drain", "Let a replica finish what it has and take nothing new."),
    ("undrain", "verbs:undrain", "Let a drained replica serve again."),
    ("restart", "verbs:restart", "Replace workers without losing a request."),
    ("mutate", "verbs:mutate", "Give a replica another role."),
    ("live", "verbs:live", "Let a replica serve while its weights arrive."),
    ("policy", "verbs:policy", "The numbers that decisions depend on."),
    ("config", "config:app", "Check settings, and show what they come to."),
    ("doctor", "doctor:doctor", "What this machine lacks, and how to mend it."),
    ("model", "model:app", "Fetch, list and look into models."),
    ("log", "log:app", "Look into the event log on disk, check it, repair it."),
    ("replay", "replay:replay", "Fold a log: states, stories, reasons, traces."),
    ("client", "client:client", "A recorded load on a running server, with a report."),
    ("sim", "sim:app", "Scheduler lab, placement search, KV accounting, the zigzag in the model."),
    ("bench", "bench:app", "How fast the parts are, on this machine."),
    ("worker", "worker:worker", "One engine worker. The daemon starts it."),
):
    app.command(f"blitzd.cli.{where}", name=name, help=text)


def main() -> None:
    try:
        app()
    except BrokenPipeError:
        # The reader of a pipe has seen enough; what is buffered goes nowhere.
        sys.stdout = None
        raise SystemExit(0) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
