//! Tests of the store, as one program: each one takes seconds to link.

mod changes;
mod copies;
mod journal;
mod model;
mod policies;
mod sources;
mod stories;
mod tier;
mod watching;
