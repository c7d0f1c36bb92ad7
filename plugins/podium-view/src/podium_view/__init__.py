"""``podium view`` shows runs in a browser, from their own files alone.

    config.yaml, … ─ runs.RunRecord ────────┐
    metrics.jsonl ── curves.Curves ─────────┤
    completions/ ─── completions.Completions│   run.Run.answer(path)   ┌── server: JSON on loopback, polled
    trace.json ───── timeline.Timeline ─────┼─▶ "curves", "group/3/7" ─┤
    ledger, logs ─── failures.Failures ─────┘                          └── export: the answers inside one file

The page (``page/``) is plain HTML, CSS and JavaScript. It asks for an answer by its path, and gets it from the server
or from the file that holds the page. Each answer reads only what it needs: a window of the trace, a group of a step.
"""
