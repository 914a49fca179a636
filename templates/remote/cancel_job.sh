#!/usr/bin/env bash
# Record that a job was cancelled: nothing of it may start any more.
# Arguments: folder, token, gently or now.
umask 077
[ "$(cat "$1/.token" 2> /dev/null)" = "$2" ] || exit 0
printf '%s' "$3" > "$1/.cancelled.$$" || exit 73
mv "$1/.cancelled.$$" "$1/cancelled"
