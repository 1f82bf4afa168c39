//! Decides whether output has colours.

use std::{env, io::IsTerminal};

/// Whether to write colours: only to terminals, and not if NO_COLOR is set (<https://no-color.org>).
pub(crate) fn has_colours(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && env::var_os("NO_COLOR").is_none_or(|set| set.is_empty())
}
