#!/bin/sh
# Greets whom it is given.
name=${1:-world}
echo "Hello, $nam!"
