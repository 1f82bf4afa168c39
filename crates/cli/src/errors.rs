//! Errors as people read them.

use std::process::ExitCode;

/// Prints an error for a person, and returns the exit code.
pub(crate) fn print_error(error: &anyhow::Error) -> ExitCode {
    eprintln!("kvlane: {}", sentence(error));
    ExitCode::FAILURE
}

/// An error and its causes, each text once. Errors of the crates are whole sentences that contain their causes, which the chain
/// then repeats for programs. So a text that the sentence has already is left out.
pub(crate) fn sentence(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for link in error.chain() {
        let link = without_numbers(link.to_string().trim_end());
        if text.contains(&link) {
            continue;
        }
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&link);
    }
    text
}

/// "Permission denied (os error 13)" without the kernel's number, which adds nothing.
fn without_numbers(text: &str) -> String {
    let mut parts = text.split(" (os error ");
    let mut left = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.split_once(')') {
            Some((number, rest)) if number.bytes().all(|byte| byte.is_ascii_digit()) => left.push_str(rest),
            _ => {
                left.push_str(" (os error ");
                left.push_str(part);
            }
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use std::io;

    use anyhow::Context;
    use kvlane_server::StartError;
    use kvlane_ssd::OpenError;

    use super::*;

    /// A missing folder of `--ssd` was told three times in one line, by each error of the chain.
    #[test]
    fn each_thing_is_said_once() {
        let source = io::Error::from_raw_os_error(5);
        let open = OpenError::Io { path: "/mnt/blocks".into(), what: "cannot lock it", source };
        let error = anyhow::Error::from(StartError::from(open));
        assert!(format!("{error:#}").matches("cannot lock it").count() > 1, "the control");
        assert_eq!(sentence(&error), "the SSD tier: /mnt/blocks: cannot lock it: Input/output error");
        let error = Err::<(), _>(anyhow::anyhow!("no such key")).context("in the file").unwrap_err();
        assert_eq!(sentence(&error), "in the file: no such key");
    }

    #[test]
    fn numbers_of_the_kernel_are_left_out() {
        assert_eq!(without_numbers("a (Denied (os error 13)): do b"), "a (Denied): do b");
        assert_eq!(without_numbers("plain (os error"), "plain (os error");
        assert_eq!(without_numbers("x (os error y) z"), "x (os error y) z");
    }
}
