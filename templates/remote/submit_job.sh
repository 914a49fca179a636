#!/usr/bin/env bash
# Submit the script of a job, held and with a comment, and print the id that sbatch prints.
# Arguments: folder, token, number of the request, comment, script. Stdin: variables, each with a
# NUL after it. May be repeated with a higher number: only one request ever reaches sbatch.
umask 077
cd "$1" || exit 66
[ "$(cat .token 2> /dev/null)" = "$2" ] || exit 66
exec {lock}> .submit || exit 73
flock -w 50 "$lock" || exit 75
[ ! -e .submitted ] || exec cat .submitted
# A request that the network delayed must not come after its repetition.
[ "$3" -gt "$(cat .request 2> /dev/null || echo 0)" ] || exit 75
echo "$3" > .request || exit 73
while IFS= read -r -d '' variable; do
  export "${variable?}"
done
sbatch --parsable --hold --comment="$4" "$5" > .submitted.part {lock}>&- || exit
mv .submitted.part .submitted
cat .submitted
