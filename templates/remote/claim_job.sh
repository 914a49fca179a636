#!/usr/bin/env bash
# Record who runs a job, unless that was already recorded; print what is recorded.
# Arguments: folder, token, the claim. Exit code 66: the folder is not here.
umask 077
[ "$(cat "$1/.token" 2> /dev/null)" = "$2" ] || exit 66
part=$1/.claim.$(uname -n).$$
printf '%s' "$3" > "$part" || exit 73
# Linking is atomic, also on NFS: of several processes exactly one succeeds.
ln "$part" "$1/claim.json" 2> /dev/null
rm -f "$part"
cat "$1/claim.json"
