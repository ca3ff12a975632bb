//! The whole supervisor over its real sockets, with a scripted device behind it.

mod copies;
mod ending;
mod graphs;
mod registrations;
mod rings;
mod sessions;
