//! Bodies of OpenAI requests: one pass over their bytes finds what a router has to know, and what need not change passes byte
//! for byte.
//!
//! ```text
//!   {"model": "m", "stream": true, "messages": [{...}, {...}]}     bytes as they came
//!    `- member --' `--- member --'  `- member: its elements --'     Scan: ranges, no copies
//!                                         |         |
//!                                       mark      mark               marks: chained hashes of the text
//! ```

mod edit;
mod error;
mod json;
mod marks;
mod scan;

pub use self::{
    edit::{Change, edit},
    error::BodyError,
    json::DEPTH_MAX,
    marks::{MARK_BYTES, Mark, marks},
    scan::{Member, Scan, find_member, scan},
};
