//! Tests of the router, without its program, as one program: each one takes seconds to link.

mod answers;
mod balance;
mod blocks;
mod body;
mod groups;
mod index;
mod legs;
mod members;
mod names;
mod pools;
mod schedule;
mod slow_readers;
mod slow_senders;
mod templates;
mod tokens;
