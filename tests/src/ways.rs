//! Ways to a Git repository that need more than a URL: SSH, HTTPS with an authority of one's own, a proxy.

use crate::plane::{Certificates, Port};
use crate::{child, tools};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// An SSH server that lets one key in, as the user who runs the test.
pub struct Sshd {
    port: Port,
    host_key: String,
    folder: PathBuf,
    user: String,
    _child: Child,
}

impl Sshd {
    /// Starts it; `authorized` is a public key.
    pub async fn start(folder: &Path, authorized: &str) -> Self {
        let folder = folder.join("sshd");
        std::fs::create_dir_all(&folder).unwrap();
        let host = keygen(&folder, "host").await;
        let user = tools::run(Command::new("id").arg("-un"), b"").await;
        std::fs::write(folder.join("authorized"), format!("{authorized}\n")).unwrap();
        // Where it drops its privileges to when it has any.
        let _ = std::fs::create_dir_all("/run/sshd");
        let port = Port::claim();
        let file = |name: &str| folder.join(name).display().to_string();
        let config = format!(
            "Port {}\nListenAddress 127.0.0.1\nHostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n",
            port.number(),
            file("host"),
            file("authorized"),
        );
        std::fs::write(folder.join("config"), config).unwrap();
        let mut command = child("/usr/sbin/sshd");
        command.args(["-D", "-e", "-f", &file("config")]).stdin(Stdio::null());
        let log = std::fs::File::create(folder.join("log")).unwrap();
        let started = command.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let end = Instant::now() + Duration::from_secs(10);
        while TcpStream::connect(("127.0.0.1", port.number())).await.is_err() {
            let said = std::fs::read_to_string(folder.join("log")).unwrap_or_default();
            assert!(Instant::now() < end, "sshd does not answer: {said}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Self {
            port,
            host_key: host.1,
            folder,
            user: String::from_utf8(user).unwrap().trim().to_owned(),
            _child: started,
        }
    }

    /// URL of a repository on this machine.
    #[must_use]
    pub fn url(&self, repository: &Path) -> String {
        format!("ssh://{}@127.0.0.1:{}{}", self.user, self.port.number(), repository.display())
    }

    /// What `ssh-keyscan` would print.
    #[must_use]
    pub fn known_hosts(&self) -> String {
        let key: Vec<&str> = self.host_key.split(' ').take(2).collect();
        format!("[127.0.0.1]:{} {}", self.port.number(), key.join(" "))
    }

    /// Lets another key in instead.
    pub fn authorize(&self, key: &str) {
        std::fs::write(self.folder.join("authorized"), format!("{key}\n")).unwrap();
    }
}

/// A new key pair: private and public text.
pub async fn keygen(folder: &Path, name: &str) -> (String, String) {
    let path = folder.join(name);
    let arguments = ["-q", "-t", "ed25519", "-N", "", "-f", path.to_str().unwrap()];
    tools::run(Command::new("ssh-keygen").args(arguments), b"").await;
    let read = |path: &Path| std::fs::read_to_string(path).unwrap().trim().to_owned();
    (read(&path), read(&path.with_extension("pub")))
}

/// Speaks TLS in front of a port on loopback.
pub struct Tls {
    port: Port,
    /// The authority that signed its certificate, as PEM.
    pub authority: String,
    serving: JoinHandle<()>,
}

impl Tls {
    /// Starts it.
    pub async fn in_front_of(folder: &Path, target: SocketAddr) -> Self {
        styrmin_client::choose_tls();
        let files = Certificates::write(folder);
        let chain = vec![CertificateDer::from_pem_file(&files.server).unwrap()];
        let key = PrivateKeyDer::from_pem_file(&files.server_key).unwrap();
        let config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key).unwrap();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let port = Port::claim();
        let listener = TcpListener::bind(("127.0.0.1", port.number())).await.unwrap();
        let serving = tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    if let (Ok(mut inner), Ok(mut outer)) =
                        (acceptor.accept(stream).await, TcpStream::connect(target).await)
                    {
                        let _ = copy_bidirectional(&mut inner, &mut outer).await;
                    }
                });
            }
        });
        let authority = std::fs::read_to_string(&files.authority).unwrap();
        Self { port, authority, serving }
    }

    /// Its port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.number()
    }
}

impl Drop for Tls {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

/// An HTTP proxy that leads wherever somebody wants to go to one port on loopback.
pub struct Proxy {
    port: Port,
    used: Arc<AtomicUsize>,
    serving: JoinHandle<()>,
}

impl Proxy {
    /// Starts it.
    pub async fn to(target: u16) -> Self {
        let port = Port::claim();
        let listener = TcpListener::bind(("127.0.0.1", port.number())).await.unwrap();
        let used = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&used);
        let serving = tokio::spawn(async move {
            loop {
                let Ok((mut inner, _)) = listener.accept().await else { continue };
                let count = Arc::clone(&count);
                tokio::spawn(async move {
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") && head.len() < 8192 {
                        match inner.read_u8().await {
                            Ok(byte) => head.push(byte),
                            Err(_) => return,
                        }
                    }
                    let Ok(mut outer) = TcpStream::connect(("127.0.0.1", target)).await else { return };
                    if head.starts_with(b"CONNECT ")
                        && inner.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").await.is_ok()
                    {
                        count.fetch_add(1, Ordering::SeqCst);
                        let _ = copy_bidirectional(&mut inner, &mut outer).await;
                    }
                });
            }
        });
        Self { port, used, serving }
    }

    /// Its URL.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.port.address())
    }

    /// How often it was used.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.serving.abort();
    }
}
