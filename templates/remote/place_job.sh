#!/usr/bin/env bash
# Unpack a job's folder from stdin on a cluster; print which of the job's inputs are missing.
# Arguments: folder, token, bytes of the archive, seconds in which it must arrive, folder of logs,
# inputs. May be repeated: gptctl does so if a reply was lost.
umask 077
is_placed() {
  [ "$(cat "$1/.token" 2> /dev/null)" = "$2" ]
}
place() {
  mkdir -p "${1%/*}" || return 73
  # A name of its own: an earlier request may still be writing.
  part=${1%/*}/.${1##*/}.$2.$$
  mkdir "$part" || return 73
  # With a time limit: if the connection is lost, nothing may stay here.
  errors=$(timeout "$4" head -c "$3" | LC_ALL=C tar -xzf - -C "$part" 2>&1) || {
    rm -rf "$part"
    case $errors in
      *"Wrote only"* | *"No space left"*) errors="No space left on device: $1" ;;
    esac
    echo "$errors" | head -n 1 >&2
    return 74
  }
  # -T fails if the folder exists: it may belong to another job.
  mv -nT "$part" "$1"
  is_placed "$@" || echo "$1 exists already, and belongs to another job" >&2
  rm -rf "$part"
  is_placed "$@" || return 73
}
is_placed "$@" || place "$@"
status=$?
# Take the rest, too: otherwise gptctl would report a lost connection.
timeout "$4" cat > /dev/null
[ "$status" = 0 ] || exit "$status"
# Slurm opens its log file there before the job starts.
mkdir -p "$5" || exit 73
for input in "${@:6}"; do
  [ -e "$input" ] || echo "$input"
done
