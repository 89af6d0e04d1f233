//! The built program, as a person or a script uses it. Everything here runs as whoever starts it.
#![forbid(unsafe_code)]

mod exec;
mod place;
mod serve;
mod terminal;
