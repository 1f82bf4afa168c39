//! Scans the JSON bodies of OpenAI requests. One pass over the bytes finds what the router has to know. Bytes that a leg does not
//! change pass as they are. Pure.
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
    edit::{BodyChange, Edited, edit},
    error::BodyError,
    json::DEPTH_MAX,
    marks::{MARK_BYTES, MARKS_MAX, Mark, marks},
    scan::{
        BodyMember, MEMBERS_MAX, MESSAGES_MAX, NAME_BYTES_MAX, Outline, Scan, find_member, outline, scan,
    },
};
