#!/usr/bin/env bash
# Run a command that must not outlive this connection. Arguments: the command.
# Without a terminal nothing tells it that sshd, the parent of this script, has exited.
"$@" <&0 &
command=$!
{
  while kill -0 "$PPID"; do
    sleep 1
  done
  kill "$command"
} < /dev/null > /dev/null 2>&1 &
watcher=$!
wait "$command"
code=$?
kill "$watcher" 2> /dev/null
exit "$code"
