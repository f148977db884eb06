//! Which cryptography TLS uses: chosen once for the process.

use std::sync::Once;

/// Chooses it, unless somebody did.
pub(crate) fn choose() {
    static ONCE: Once = Once::new();
    // An error says that it is chosen already.
    ONCE.call_once(|| drop(rustls::crypto::ring::default_provider().install_default()));
}
