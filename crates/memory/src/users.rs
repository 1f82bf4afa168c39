//! Numbers of users, by their names.

use std::ffi::{CStr, CString};
use std::{mem, ptr};

/// Longest entry of a user that is read.
const ENTRY_BYTES_MAX: usize = 1 << 16;

/// The number of a user: of a name that this host knows, or the number itself. None: neither.
pub fn user_number(named: &str) -> Option<u32> {
    named.parse().ok().or_else(|| number_of(&CString::new(named).ok()?))
}

fn number_of(name: &CStr) -> Option<u32> {
    // SAFETY: passwd is pointers and integers; all zero is a value.
    let mut entry: libc::passwd = unsafe { mem::zeroed() };
    let mut texts = vec![0; ENTRY_BYTES_MAX];
    let mut found = ptr::null_mut();
    // SAFETY: the name ends with a zero; entry, texts and found are live, and the texts' length is theirs.
    let result = unsafe {
        libc::getpwnam_r(name.as_ptr(), &raw mut entry, texts.as_mut_ptr(), texts.len(), &raw mut found)
    };
    (result == 0 && !found.is_null()).then_some(entry.pw_uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_have_numbers() {
        assert_eq!(user_number("root"), Some(0));
        assert_eq!(user_number("54321"), Some(54321));
        for wrong in ["", "no such user", "-1", "4294967296", "ro\0ot"] {
            assert_eq!(user_number(wrong), None, "{wrong:?}");
        }
    }
}
