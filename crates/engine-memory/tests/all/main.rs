//! Tests of an engine's memory, within one process, as one program: each one takes seconds to link.

mod fences;
mod own;
