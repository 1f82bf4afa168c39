//! User ids: by name, and whether an equal id proves that two users are the same.

use std::ffi::{CStr, CString};
use std::{mem, ptr};

/// Limit of a user's entry in the user database, in bytes.
const ENTRY_BYTES_MAX: usize = 1 << 16;

/// The id of a user, given by a name that this host knows or by the number itself. None if it is neither.
pub fn user_number(named: &str) -> Option<u32> {
    named.parse().ok().or_else(|| number_of(&CString::new(named).ok()?))
}

fn number_of(name: &CStr) -> Option<u32> {
    // SAFETY: passwd is pointers and integers, for which all zeros are a value.
    let mut entry: libc::passwd = unsafe { mem::zeroed() };
    let mut texts = vec![0; ENTRY_BYTES_MAX];
    let mut found = ptr::null_mut();
    // SAFETY: the name ends with a zero; entry, texts and found are live, and the texts' length is theirs.
    let result = unsafe {
        libc::getpwnam_r(name.as_ptr(), &raw mut entry, texts.as_mut_ptr(), texts.len(), &raw mut found)
    };
    (result == 0 && !found.is_null()).then_some(entry.pw_uid)
}

/// Whether this process's user id is the one that the kernel shows for all users without an id in this user namespace,
/// mostly 65534. Then an equal user id proves nothing.
pub fn own_user_is_unclear() -> bool {
    let own = rustix::process::geteuid().as_raw();
    // If the map cannot be read, assume that some users have no id here.
    own == unknown_user()
        && !std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| maps_every_user(&map))
}

/// Whether each user of the host has the same id in this user namespace, by the kernel's uid_map.
fn maps_every_user(uid_map: &str) -> bool {
    uid_map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
}

/// The id that the kernel shows for users who have none in this process's user namespace.
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
        assert!(maps_every_user("         0          0 4294967295\n"));
        for map in ["", "0 1000 1\n", "0 100000 65536\n", "0 0 65536\n", "0 0 1000\n1000 1000 4294966295\n"] {
            assert!(!maps_every_user(map), "{map}");
        }
        assert!(!own_user_is_unclear() || rustix::process::geteuid().as_raw() == unknown_user());
    }
}
