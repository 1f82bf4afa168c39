//! Tests of what a block is, as one program: each one takes seconds to link.

mod merging;
mod runs_match_a_byte_model;
mod shard_layouts;
mod slices_match_the_whole_block;
