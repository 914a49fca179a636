#!/usr/bin/env bash
# Unpack a job's folder from stdin, and become its agent.
# Arguments: folder, bytes of the archive, node, seconds that the archive may take.
umask 077
mkdir -p "${1%/*}" || exit 73
mkdir "$1" || {
  [ ! -e "$1" ] || echo "$1 exists: do hosts share run_root, or did another gptctl create it?" >&2
  exit 73
}
# The limit: nobody may be left waiting for an archive that was cut off.
said=$(timeout "$4" head -c "$2" | LC_ALL=C tar -xzf - -C "$1" 2>&1) || {
  rm -rf "$1"
  case $said in
    *"Wrote only"* | *"No space left"*) said="No space left on device: $1" ;;
  esac
  echo "$said" | head -n 1 >&2
  exit 74
}
GPTCTL_RUN_DIR=$1 GPTCTL_ROLL_BACK=$4 exec bash --norc "$1/agent.sh" agent "$3"
