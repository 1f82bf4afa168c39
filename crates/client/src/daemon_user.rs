//! Decides which users' daemons an engine or a tool trusts: this user's, root's, and one more that it may name.

use std::{fmt, os::fd::AsFd, str::FromStr};

use kvlane_memory::{PeerCredentials, own_user_is_unclear, user_number};
use thiserror::Error;

/// A user whose daemon is trusted beside this user's own and root's. By default there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DaemonUser(Option<u32>);

/// A text that is neither a user's name on this host nor a number.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("'{0}' is no user of this host: give the name or the number of the user who runs the daemon")]
pub struct NoSuchUser(pub String);

impl FromStr for DaemonUser {
    type Err = NoSuchUser;

    fn from_str(text: &str) -> Result<Self, NoSuchUser> {
        user_number(text).map(|uid| Self(Some(uid))).ok_or_else(|| NoSuchUser(text.to_owned()))
    }
}

/// A process listens whose user is not trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stranger {
    /// The user of the process that listens at the address.
    pub uid: u32,
    /// The user of this process.
    pub own: u32,
}

impl fmt::Display for Stranger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { uid, own } = self;
        if uid == own {
            return write!(
                f,
                "user {uid} listens there, but in this user namespace every user without a number looks so, as this process \
                 does: run it as another user, or name the daemon's user if nobody else can listen there \
                 (kvlane.daemon_user for engines, --daemon-user for tools, or KVLANE_DAEMON_USER)"
            );
        }
        write!(
            f,
            "user {uid} listens there, and this process belongs to user {own}: if that is your daemon, name its user \
             (kvlane.daemon_user for engines, --daemon-user for tools, or KVLANE_DAEMON_USER)"
        )
    }
}

impl DaemonUser {
    /// The user that listens at the other end of a connected socket, if it is not trusted. The kernel records the user that
    /// began to listen, so a socket that systemd hands down is root's.
    ///
    /// # Errors
    /// The kernel does not name the user.
    pub(crate) fn stranger_at(self, stream: impl AsFd) -> std::io::Result<Option<Stranger>> {
        let uid = PeerCredentials::of(stream)?.uid;
        let own = rustix::process::geteuid().as_raw();
        Ok((!self.accepts(uid, own, own_user_is_unclear())).then_some(Stranger { uid, own }))
    }

    fn accepts(self, uid: u32, own: u32, own_is_unclear: bool) -> bool {
        (uid == own && !own_is_unclear) || uid == 0 || self.0 == Some(uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_user_root_and_the_named_one_are_talked_to() {
        let (nobody, named) = (DaemonUser::default(), "1001".parse::<DaemonUser>().unwrap());
        for user in [nobody, named] {
            assert!(user.accepts(1000, 1000, false) && user.accepts(0, 1000, false));
            assert!(!user.accepts(1002, 1000, false));
        }
        assert!(named.accepts(1001, 1000, false) && named.accepts(1001, 0, false));
        assert!(!nobody.accepts(1001, 1000, false));
        assert!(!nobody.accepts(1001, 0, false), "root trusts nobody else's either");
        // In a user namespace whose nobody this process is, all who have no number look like it.
        assert!(!nobody.accepts(65534, 65534, true) && nobody.accepts(0, 65534, true));
        assert!("65534".parse::<DaemonUser>().unwrap().accepts(65534, 65534, true), "it was named");
        assert!(Stranger { uid: 65534, own: 65534 }.to_string().contains("user namespace"));
        assert_eq!("no such user".parse::<DaemonUser>(), Err(NoSuchUser("no such user".into())));
    }
}
