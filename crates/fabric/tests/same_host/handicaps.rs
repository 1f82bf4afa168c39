//! Handicaps that a process gives itself: forbidden system calls, an ended first thread.

use std::time::Instant;

use crate::support::PATIENCE;

/// From now on this process gets EPERM where it would read or write the memory of another one.
pub(crate) fn forbid_process_vm() {
    forbid(libc::SYS_process_vm_readv, libc::SYS_process_vm_writev);
}

/// From now on this process gets EPERM for two system calls.
pub(crate) fn forbid(one: libc::c_long, other: libc::c_long) {
    let step = |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let is =
        |call: libc::c_long, jt: u8| step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, jt, 0, call as u32);
    let answer = |what: u32| step(libc::BPF_RET | libc::BPF_K, 0, 0, what);
    let mut filter = [
        // The call's number, the first word of what a filter sees.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        is(one, 2),
        is(other, 1),
        answer(libc::SECCOMP_RET_ALLOW),
        answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: it takes numbers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    let (mode, flags) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_TSYNC);
    // SAFETY: the filter is read only during the call.
    let set = unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

/// From now on whoever asks for this process by its id finds a thread that has ended, although others go on.
pub(crate) fn end_first_thread() {
    extern "C" fn end(_: libc::c_int) {
        // SAFETY: it ends this thread only, which does nothing any more.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    let end: extern "C" fn(libc::c_int) = end;
    let first = std::process::id() as libc::pid_t;
    // SAFETY: what handles the signal makes one system call and touches nothing.
    unsafe { libc::signal(libc::SIGUSR1, end as libc::sighandler_t) };
    // SAFETY: it takes numbers.
    assert_eq!(unsafe { libc::syscall(libc::SYS_tgkill, first, first, libc::SIGUSR1) }, 0);
    let begun = Instant::now();
    let has_ended = || std::fs::read_to_string("/proc/self/stat").unwrap().contains(") Z ");
    while !has_ended() {
        assert!(begun.elapsed() < PATIENCE, "the first thread does not end");
        std::thread::yield_now();
    }
}
