//! Trace files: one JSON document a line.
//!
//! ```text
//!   {"kvlane_trace":1,"grade":"blocks","tokens_per_block":16,"dropped":0,..}   header, padded to 1,024 bytes
//!   {"model":0,"tokens_per_block":16,"block_bytes":2097152}                    a model, before its first request
//!   {"timestamp":12,"input_length":8000,"output_length":200,"hash_ids":[[0,499]],"saved_ids":[[500,512]],..}
//! ```
//! The recorder writes the header again as it goes, in place, so that a recording that is cut off is still true.
//!
//! | field of a request | what it is |
//! |---|---|
//! | `timestamp` | ms from the start of the recording until the request came |
//! | `hash_ids` | the looked-up blocks, from the prompt's first one on: a number, or `[first, last]` |
//! | `saved_ids` | blocks behind them that were saved: the prompt's last one, and those of the answer |
//! | `input_length`, `output_length` | tokens; missing if the engine did not report the request's end |
//! | `ram_blocks`, `ssd_blocks`, `peer_blocks` | which of `hash_ids` were found, from the first one on; 0 is left out |
//! | `engine_tokens` | tokens that the engine had in its own cache; 0 is left out |
//! | `engine`, `model` | numbers, by first appearance; `engine_name` with `--names` |
//! | `ttft_ms` | ms until the first token, in recordings of a router |
//! | `leg` | `prefill` or `decode`, if two engines served the request |
//!
//! [`Parser`] also reads Mooncake's and Qwen-Bailian's traces.

mod header;
mod line;
mod parser;

pub use header::{Header, ModelLine, VERSION};
pub use line::RequestLine;
pub use parser::{BLOCKS_MAX, Format, ParseError, Parser, TraceRequest};
