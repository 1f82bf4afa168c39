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

/// Whether every user without a number in this process's user namespace looks like the user who runs it: the kernel shows all
/// of them as one number, 65534 mostly, and that is this user's. Then an equal number proves nothing.
pub fn own_user_is_unclear() -> bool {
    let own = rustix::process::geteuid().as_raw();
    // Where it cannot be read nobody knows.
    own == unknown_user() && !std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| numbers_all(&map))
}

/// Whether each user of the host has the same number here, as this file of the kernel tells.
fn numbers_all(uid_map: &str) -> bool {
    uid_map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

/// What the kernel says of users who have no number in this process's user namespace.
pub(crate) fn unknown_user() -> u32 {
    const USUAL: u32 = 65534;
    let said = std::fs::read_to_string("/proc/sys/kernel/overflowuid");
    said.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(USUAL)
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

    #[test]
    fn only_the_host_s_own_numbers_tell_all_users_apart() {
        assert!(numbers_all("         0          0 4294967295\n"));
        for map in ["", "0 1000 1\n", "0 100000 65536\n", "0 0 65536\n", "0 0 1000\n1000 1000 4294966295\n"] {
            assert!(!numbers_all(map), "{map}");
        }
        assert!(!own_user_is_unclear() || rustix::process::geteuid().as_raw() == unknown_user());
    }
}
