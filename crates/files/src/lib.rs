//! The file tools: read, write, edit, move, remove, glob, grep and watch.
//!
//! The code runs where the programs of the cell run, under the same mounts, ids and rules, so that
//! a shell and every tool see one file system, and what a path may reach is the kernel's decision
//! and not a comparison of strings. It knows no session and no daemon: [`Files::serve`] takes a
//! [`FileCall`] and answers it through a [`Reply`].

#![forbid(unsafe_code)]

pub mod call;
mod change;
mod edit;
mod entry;
mod fault;
mod in_place;
mod lock;
mod media;
mod read;
mod recover;
mod replace;
mod resolve;
mod search;
mod serve;
mod stamp;
mod steps;
mod store;
mod syncs;
#[cfg(test)]
mod testing;
mod text;
mod watch;
mod write;

pub use call::FileCall;
pub use serve::{Files, Gone, Reply};
