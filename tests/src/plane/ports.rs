//! Ports on loopback that nobody else on this machine takes, however many test runs there are.
//!
//! A port that was only found free can be taken before the program that shall have it listens. So a
//! port is claimed by a lock of the whole machine, an abstract socket, which the kernel gives back
//! when the process ends, however it ends. The ports lie below the range that the kernel gives to
//! outgoing connections.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};

const FIRST: u16 = 15_000;
const LAST: u16 = 31_000;

/// A claimed port; free again when dropped.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _claim: UnixListener,
}

impl Port {
    /// Claims a port that nothing listens on.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn claim() -> Self {
        for _ in 0..1000 {
            let number = rand::random_range(FIRST..LAST);
            let name = SocketAddr::from_abstract_name(format!("styrmin-test-port-{number}")).unwrap();
            let Ok(claim) = UnixListener::bind_addr(&name) else { continue };
            if TcpListener::bind(("127.0.0.1", number)).is_ok() {
                return Self { number, _claim: claim };
            }
        }
        panic!("no free port between {FIRST} and {LAST}");
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.number
    }

    /// `127.0.0.1:<number>`.
    #[must_use]
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.number)
    }
}
