#!/bin/sh
# The whole system on one machine: serve the embedded model on two ranks, talk to it, prove the cache, measure, report, stop.
#   demo.sh path/to/dix          everything
#   demo.sh path/to/dix bench    only the short benchmark and its report
set -eu

DIX=$1
WHAT=${2:-all}
NAME=demo-$$

say() { printf '\n== %s\n' "$1"; }
trap '"$DIX" stop "$NAME" >/dev/null 2>&1 || true' EXIT
trap 'exit 130' INT TERM

say "start two ranks of the embedded model in the background"
"$DIX" start tiny --name "$NAME" --dp 2 --port 0
URL=$("$DIX" status "$NAME" --json | sed -n 's/.*"url": *"\([^"]*\)".*/\1/p' | head -n 1)
"$DIX" status "$NAME"

if [ "$WHAT" = all ]; then
    say "one chat turn"
    "$DIX" chat --url "$URL" --once "What is the capital of France?" --max-tokens 48 --temperature 0
    say "the same conversation without and with the host prefix cache"
    "$DIX" check-cache --url "$URL" --turns 3
fi

say "a short benchmark"
"$DIX" bench run smoke --url "$URL"
say "the report of that run"
"$DIX" report last
say "stop"
"$DIX" stop "$NAME"
