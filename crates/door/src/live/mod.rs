//! The live page of a program: one HTML file in the binary, which shows what `/live` answers, once a second while it is open.
//!
//! ```text
//!   browser                               program
//!   GET /              ----------------->  page.html with style, widgets and the program's script
//!   GET /live?after=0  ----------------->  the present figures, and ten minutes of samples
//!   GET /live?after=N  -- once a second ->  the present figures, and the samples from number N on
//! ```
//! The program samples its rates once a second, whether or not somebody looks. The page loads nothing else, because its
//! Content-Security-Policy lets it connect to the program only.

mod history;
mod page;
mod problems;

pub use self::{
    history::{History, Rates, SAMPLES_MAX},
    page::{After, LivePage},
    problems::{Problems, Severity},
};
