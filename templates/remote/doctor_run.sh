#!/usr/bin/env bash
# Run the doctor's script, and print the files that it wrote as an archive.
# Arguments: folder, seconds, what to check.
cd "$1" || exit 73
timeout --kill-after=5 "$2" bash --norc doctor.sh "$3" < /dev/null > /dev/null 2>&1
for file in node.* reduce.*; do
  [ ! -f "$file" ] || echo "$file"
done | tar -cf - -T -
