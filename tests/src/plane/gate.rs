//! A TCP connection that can be cut: each program reaches the API server through a gate of its own.

use super::ports::Port;
use std::sync::Arc;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// A port in front of another one.
#[derive(Debug)]
pub struct Gate {
    port: Port,
    open: Arc<watch::Sender<bool>>,
    serving: JoinHandle<()>,
}

impl Gate {
    /// Opens a gate in front of `target`, a port on loopback.
    pub async fn open(target: u16) -> Self {
        let port = Port::claim();
        let listener = TcpListener::bind(("127.0.0.1", port.number())).await.unwrap();
        let open = Arc::new(watch::channel(true).0);
        let state = Arc::clone(&open);
        let serving = tokio::spawn(async move {
            loop {
                let Ok((inner, _)) = listener.accept().await else { continue };
                let mut state = state.subscribe();
                tokio::spawn(async move {
                    if *state.borrow_and_update() {
                        tokio::select! {
                            () = pass(inner, target) => {}
                            _ = state.wait_for(|open| !open) => {}
                        }
                    }
                });
            }
        });
        Self { port, open, serving }
    }

    /// The port to use instead of the target's.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.port.number()
    }

    /// Breaks every connection and takes no new one.
    pub fn cut(&self) {
        self.open.send_replace(false);
    }

    /// Lets connections through again.
    pub fn mend(&self) {
        self.open.send_replace(true);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.cut();
        self.serving.abort();
    }
}

async fn pass(mut inner: TcpStream, target: u16) {
    if let Ok(mut outer) = TcpStream::connect(("127.0.0.1", target)).await {
        let _ = inner.set_nodelay(true);
        let _ = outer.set_nodelay(true);
        let _ = copy_bidirectional(&mut inner, &mut outer).await;
    }
}
