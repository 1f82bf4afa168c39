//! Whose daemon an engine or a tool talks to.

use std::{fmt, os::fd::AsFd, str::FromStr};

use kvlane_memory::{PeerCredentials, user_number};
use thiserror::Error;

/// A user whose daemon is talked to beside this user's own and root's. The default is nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DaemonUser(Option<u32>);

/// Neither a user's name on this host nor a number.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("'{0}' is no user of this host: give the name or the number of the user who runs the daemon")]
pub struct NoSuchUser(pub String);

impl FromStr for DaemonUser {
    type Err = NoSuchUser;

    fn from_str(text: &str) -> Result<Self, NoSuchUser> {
        user_number(text).map(|uid| Self(Some(uid))).ok_or_else(|| NoSuchUser(text.to_owned()))
    }
}

/// Somebody else listens there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stranger {
    /// Who listens.
    pub uid: u32,
    /// Who runs this process.
    pub own: u32,
}

impl fmt::Display for Stranger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { uid, own } = self;
        write!(
            f,
            "user {uid} listens there, and this process belongs to user {own}: if that is your daemon, name its user \
             (kvlane.daemon_user for engines, --daemon-user for tools, or KVLANE_DAEMON_USER)"
        )
    }
}

impl DaemonUser {
    /// Who listens at the other end of a connected socket, if it is nobody to talk to. The kernel noted it when they began to
    /// listen, so a socket that was handed down, as systemd does, is root's.
    ///
    /// # Errors
    /// The kernel does not say.
    pub(crate) fn stranger_at(self, stream: impl AsFd) -> std::io::Result<Option<Stranger>> {
        let uid = PeerCredentials::of(stream)?.uid;
        let own = rustix::process::geteuid().as_raw();
        Ok((!self.accepts(uid, own)).then_some(Stranger { uid, own }))
    }

    fn accepts(self, uid: u32, own: u32) -> bool {
        uid == own || uid == 0 || self.0 == Some(uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_user_root_and_the_named_one_are_talked_to() {
        let (nobody, named) = (DaemonUser::default(), "1001".parse::<DaemonUser>().unwrap());
        for user in [nobody, named] {
            assert!(user.accepts(1000, 1000) && user.accepts(0, 1000));
            assert!(!user.accepts(1002, 1000));
        }
        assert!(named.accepts(1001, 1000) && named.accepts(1001, 0));
        assert!(!nobody.accepts(1001, 1000) && !nobody.accepts(1001, 0), "root trusts nobody else's either");
        assert_eq!("no such user".parse::<DaemonUser>(), Err(NoSuchUser("no such user".into())));
    }
}
