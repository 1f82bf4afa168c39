//! Decides whether output has colours.

use std::{env, io::IsTerminal};

/// Whether to write colours: to terminals only, and not where the user wants none (<https://no-color.org>).
pub(crate) fn has_colours(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && env::var_os("NO_COLOR").is_none_or(|set| set.is_empty())
}
