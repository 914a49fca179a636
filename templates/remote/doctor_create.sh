#!/usr/bin/env bash
# Unpack the doctor's folder from stdin; print the parent folders that it creates, deepest first.
# Arguments: folder, a word if another host creates it.
[ -z "$2" ] || {
  # Count: bash's SECONDS follows the clock, which somebody may set.
  for _ in {1..50}; do
    [ ! -e "$1/doctor.sh" ] || exit 0
    sleep 0.2
  done
  echo "$1 of the first host is not visible here, although the profile has shared_fs: true" >&2
  exit 73
}
umask 077
above=${1%/*}
while [ ! -d "$above" ]; do
  echo "$above"
  above=${above%/*}
done
mkdir -p "${1%/*}" && mkdir "$1" && exec tar -xzf - -C "$1"
