#!/usr/bin/env bash
# Unpack the doctor's folder from stdin, and print the parent folders that had to be created, deepest first.
# Arguments: folder, not empty if another host creates it.
[ -z "$2" ] || {
  while [ "$SECONDS" -lt 10 ]; do
    [ ! -e "$1/doctor.sh" ] || exit 0
    sleep 0.2
  done
  echo "$1, created by the first host, is not visible here, though the profile has shared_fs: true" >&2
  exit 73
}
umask 077
above=${1%/*}
while [ ! -d "$above" ]; do
  echo "$above"
  above=${above%/*}
done
mkdir -p "${1%/*}" && mkdir "$1" && exec tar -xzf - -C "$1"
