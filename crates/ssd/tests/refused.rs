//! If the system refuses io_uring, as container runtimes do, the tier works with threads and says so.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]
#![allow(unsafe_code, reason = "a filter of system calls has no safe interface")]

mod support;

use std::process::Command;

use support::*;

/// Staging is used without io_uring, too.
const PATH: kvlane_ssd::SsdPath = kvlane_ssd::SsdPath::Staged;

/// Set for the process that lives under the filter.
const CHILD: &str = "KVLANE_SSD_TEST_REFUSED";

/// From now on this process is told EPERM when it asks for an io_uring.
fn refuse_io_uring() {
    let load_number = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let jump_if_equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let answer = libc::BPF_RET | libc::BPF_K;
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        step(load_number, 0, 0, 0),
        step(jump_if_equal, 0, 1, libc::SYS_io_uring_setup as u32),
        step(answer, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        step(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its filter live during the calls, which copy them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program), 0);
    }
}

/// Not a test by itself: what runs under the filter.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    refuse_io_uring();
    let (directory, mut pool) = (tempfile::tempdir().unwrap(), Pool::new(MIB));
    let path = directory.path().join("tier");
    for round in 0..2 {
        let tier = open(small(&path), &pool);
        let status = &tier.status()[0];
        assert_eq!((status.io, status.registered), ("threads", false));
        assert!(status.notes.iter().any(|note| note.contains("no io_uring") && note.contains("os error 1")));
        for number in 0..20 {
            let block = Block::new(number, &[30_000, 7]);
            if round == 0 {
                store(&tier, &mut pool, &block);
            }
            assert!(is_found(&tier, &mut pool, &block));
        }
        close(tier);
    }
    println!("worked without io_uring");
}

#[test]
fn without_io_uring_a_few_threads_do_it_and_the_status_says_why() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("worked without io_uring"), "{said}");
}
