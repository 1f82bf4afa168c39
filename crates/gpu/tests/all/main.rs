//! Tests of GPUs within one process. They are one program, because each program takes seconds to link.

mod busy;
mod calibrate;
mod copies_match_a_byte_model;
mod events;
mod faults;
mod on_a_gpu;
mod rail_choices;
mod rails;
mod rates;
mod stream_word;
mod tables;
mod together;

#[path = "../support/mod.rs"]
mod support;
