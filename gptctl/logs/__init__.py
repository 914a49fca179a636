"""The per-rank logs of a job: read, merged by time, followed, filtered, and asked who failed first.

    show_logs(LocalLogFiles(log_dir, run_dir), Wanted(ranks=parse_ranks("0,3")), Lines(grep=Grep("loss")))

`files` says what a transport offers, `stream` merges and follows, `show` writes lines, `tables` has the other answers.
Nothing here knows `gptctl.cli`.
"""
