// SPDX-License-Identifier: MIT OR Apache-2.0

//! The thread that accepts connections and answers requests.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::routing::get;
use axum::Router;
use futures_util::future::{select, Either};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::TcpStream;
use tokio::sync::{oneshot, OwnedSemaphorePermit, Semaphore};
use tower::ServiceExt;

use crate::changes::MAX_CHANGES;
use crate::error::ApiError;
use crate::events::{self, Publisher};
use crate::guard::{protect, require_login, Peer};
use crate::pages;
use crate::site::{Access, App, Changed, Site, State};
use crate::token::MIN_TOKEN;

/// Threads for operations that block: those of the changes, and some that read the state.
const BLOCKING_THREADS: usize = MAX_CHANGES + 4;
/// Connections at the same time. Further ones wait.
const MAX_CONNECTIONS: usize = 128;
/// How long a connection may be idle, and how long the header of a request may take.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of a connection's buffer, and of the header of a request.
const MAX_BUFFER: usize = 64 << 10;
/// How long requests have to end when the server is stopped.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// A server. Dropping it stops the server.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// What a program serves.
pub struct Service {
    /// The page and its files.
    pub site: &'static Site,
    /// The state that the page shows.
    pub state: Arc<dyn State>,
    /// Says when the state has changed.
    pub changed: Changed,
    /// The paths below `/api` in addition to `/status` and `/events`. Only requests with a login reach them.
    pub api: Router,
}

/// Serves a program's pages to the clients that connect to `listener`, on a thread of its own.
///
/// # Errors
///
/// `InvalidInput` if the token has fewer than [`MIN_TOKEN`] bytes; the error of the system call if no thread or no runtime can
/// be created.
pub fn serve(service: Service, listener: TcpListener, access: &Access) -> io::Result<Server> {
    if access.token.len() < MIN_TOKEN {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("the token is too short; use at least {MIN_TOKEN} characters"),
        ));
    }
    let address = listener.local_addr()?;
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_name("web-change")
        .build()?;
    let listener = {
        let _entered = runtime.enter();
        tokio::net::TcpListener::from_std(listener)?
    };
    let (publisher, snapshots) = Publisher::new(service.changed);
    let app = App::new(service.site, service.state, access, snapshots);
    let router = router(&app, service.api);
    let (stop, stopped) = oneshot::channel();
    let thread = std::thread::Builder::new().name("web".into()).spawn(move || {
        runtime.block_on(run(listener, app, router, publisher, stopped));
        // Changes that take longer are not waited for.
        runtime.shutdown_timeout(STOP_TIMEOUT);
    })?;
    Ok(Server {
        address,
        stop: Some(stop),
        thread: Some(thread),
    })
}

impl Server {
    /// Returns the address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Ends event streams, lets requests end for some seconds, and stops the server.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread has printed its panic.
            drop(thread.join());
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// Returns all paths.
fn router(app: &Arc<App>, api: Router) -> Router {
    let guide = app.site.guide;
    let refuse = move |status, what| async move { ApiError::new(status, format!("{what}; see the table in {guide}")) };
    let own = Router::new()
        .route("/status", get(events::status))
        .route("/events", get(events::events))
        .with_state(Arc::clone(app));
    let api = api
        .merge(own)
        .fallback(move || refuse(StatusCode::NOT_FOUND, "there is no such path"))
        .method_not_allowed_fallback(move || {
            refuse(StatusCode::METHOD_NOT_ALLOWED, "the path does not have this method")
        })
        .layer(from_fn_with_state(Arc::clone(app), require_login));
    let pages = pages::routes(app.site).with_state(Arc::clone(app));
    protect(pages.nest("/api", api), Arc::clone(&app.cookie))
}

/// Accepts connections until `stopped` is complete.
async fn run(
    listener: tokio::net::TcpListener,
    app: Arc<App>,
    router: Router,
    publisher: Publisher,
    mut stopped: oneshot::Receiver<()>,
) {
    let publisher = tokio::spawn(publisher.run(app));
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let graceful = GracefulShutdown::new();
    while let Either::Left((accepted, _)) = select(pin!(accept(&listener, &connections)), &mut stopped).await {
        match accepted {
            Ok((stream, peer, permit)) => answer(stream, peer, &router, &graceful, permit),
            // Usually the process has too many open files: wait until some are closed.
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
    drop(listener);
    // Ends the event streams.
    publisher.abort();
    drop(tokio::time::timeout(STOP_TIMEOUT, graceful.shutdown()).await);
}

/// Accepts a connection, after one of too many connections has ended.
async fn accept(
    listener: &tokio::net::TcpListener,
    connections: &Arc<Semaphore>,
) -> io::Result<(TcpStream, SocketAddr, OwnedSemaphorePermit)> {
    let permit = Arc::clone(connections)
        .acquire_owned()
        .await
        .map_err(io::Error::other)?;
    let (stream, peer) = listener.accept().await?;
    Ok((stream, peer, permit))
}

/// Answers the requests of a connection in a task of its own.
fn answer(
    stream: TcpStream,
    peer: SocketAddr,
    router: &Router,
    graceful: &GracefulShutdown,
    permit: OwnedSemaphorePermit,
) {
    // Events are small, and should arrive at once. Without the option they arrive later.
    drop(stream.set_nodelay(true));
    let router = router.clone();
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let mut request: Request = request.map(Body::new);
        request.extensions_mut().insert(Peer(peer.ip()));
        router.clone().oneshot(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_BUFFER)
        .serve_connection(TokioIo::new(stream), service);
    let connection = graceful.watch(connection);
    tokio::spawn(async move {
        // The client closed the connection, or sent no HTTP.
        drop(connection.await);
        drop(permit);
    });
}
