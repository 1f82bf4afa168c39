//! Tests of the pool's memory, as one program: each one takes seconds to link.

mod arena;
mod extents_match_a_model;
