#!/bin/sh
# Runs every case; the exit status is the number of failures.
failures=0
check() {
    got=$(sh greet.sh $1)
    if [ "$got" = "$2" ]; then
        echo "ok: greet $1"
    else
        echo "FAILED: greet $1: expected '$2', got '$got'"
        failures=$((failures + 1))
    fi
}
check "" "Hello, world!"
check Ada "Hello, Ada!"
exit $failures
