//! Small black-box cases, each with its right answer, retold from public bug reports about agent
//! tools. One file of `tests/` an area; the case's id is in the name of its test.
#![forbid(unsafe_code)]
