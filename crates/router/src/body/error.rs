//! Why a body is refused.

/// A body that no engine could take: the sentence is for the client, `at` counts bytes from the body's first.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// JSON is UTF-8.
    #[error("the body is not UTF-8 from byte {at} on")]
    NotUtf8 {
        /// The first byte that fits nowhere.
        at: usize,
    },
    /// Something else stands where JSON wants this.
    #[error("the body is not JSON: at byte {at} there should be {expected}")]
    NotJson {
        /// Bytes before the wrong one.
        at: usize,
        /// In words: "a value", "`,` or `}`".
        expected: &'static str,
    },
    /// Brackets within brackets.
    #[error("the body is nested deeper than {most} levels, at byte {at}")]
    TooDeep {
        /// The bracket that is one too many.
        at: usize,
        /// Levels that are taken.
        most: usize,
    },
    /// JSON, but an array, a string, a number.
    #[error("the body is JSON, but not an object")]
    NotAnObject,
    /// Which of the two an engine takes nobody can know.
    #[error("the body has \"{key}\" twice, the second time at byte {at}")]
    Twice {
        /// The member's name.
        key: String,
        /// Where the second one begins.
        at: usize,
    },
    /// An array or object has more elements than the router keeps ranges of.
    #[error("the body has more than {most} {what}, from byte {at} on")]
    TooMany {
        /// "members" or "messages".
        what: &'static str,
        /// Offset of the first element that is too many.
        at: usize,
        /// Number of elements that the router takes.
        most: usize,
    },
    /// The name is longer than that of any member that engines know.
    #[error("the body has a member whose name is longer than {most} bytes, at byte {at}")]
    LongName {
        /// Offset at which the name begins.
        at: usize,
        /// Longest name that the router takes.
        most: usize,
    },
}
