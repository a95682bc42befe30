// SPDX-License-Identifier: MIT OR Apache-2.0

//! Serves devices: each listens at its socket for one client after another. A signal ends all of them in order.

use std::collections::BTreeMap;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use p2pmem_vfio_user::{Device, Health, Listener, serve};
use signal_hook::consts::{SIGINT, SIGTERM};
use tracing::{error, info};

use crate::control::Control;

/// Maximum time after a signal until all connections have ended.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);

/// Paths of a device's sockets and files.
#[derive(Clone, Debug)]
pub struct DevicePaths {
    /// UNIX domain socket for the vfio-user client.
    pub socket: PathBuf,
    /// Control socket, if the device has one.
    pub control: Option<PathBuf>,
    /// File for the counters in JSON, if any. Written when a client has disconnected, and at the end of the process.
    pub counters: Option<PathBuf>,
}

impl DevicePaths {
    /// Removes the sockets.
    fn clear(&self) {
        for socket in std::iter::once(&self.socket).chain(&self.control) {
            // Fails if the file was removed already.
            let _ = std::fs::remove_file(socket);
        }
    }
}

/// The listening sockets of a device.
#[derive(Debug)]
pub struct DeviceServer {
    name: String,
    paths: DevicePaths,
    control: Control,
    listener: Listener,
}

/// Adds the path to an error of listening.
fn listen_error(path: &Path) -> impl FnOnce(io::Error) -> io::Error {
    let path = path.display().to_string();
    move |error| io::Error::new(error.kind(), format!("cannot listen on {path}: {error}"))
}

impl DeviceServer {
    /// Listens on the sockets of the device `name`.
    ///
    /// # Errors
    ///
    /// A socket cannot be created.
    pub fn bind(name: &str, paths: DevicePaths, control: Control) -> io::Result<Self> {
        if let Some(path) = &paths.control {
            control.clone().listen(path).map_err(listen_error(path))?;
        }
        let listener = Listener::bind(&paths.socket).map_err(listen_error(&paths.socket))?;
        Ok(Self {
            name: name.to_owned(),
            paths,
            control,
            listener,
        })
    }

    /// Returns a function that writes the counters and removes the sockets, for the end of the process.
    pub fn cleanup(&self) -> impl FnOnce() + Send + 'static {
        let (name, paths, control) = (self.name.clone(), self.paths.clone(), self.control.clone());
        move || {
            save_counters(&name, &paths, &control);
            paths.clear();
        }
    }

    /// Serves `device` to one client after another, until the process ends, or with `once`, to one client. A device
    /// that panics, on the serving thread or on a thread of its own, is not served again; other devices continue.
    ///
    /// Returns the device if the process is about to end. The last read of the counters needs the device's worker, so
    /// the caller must keep the device until the process exits.
    ///
    /// # Errors
    ///
    /// Those of accept.
    pub fn serve(
        self,
        mut device: Box<dyn Device>,
        health: &Health,
        shutdown: &ProcessShutdown,
        once: bool,
    ) -> io::Result<Option<Box<dyn Device>>> {
        let name = &*self.name;
        loop {
            let stream = self.listener.accept()?;
            info!(name, "client connected");
            let client = shutdown.add_client(stream.try_clone()?);
            self.control.set_connected(true);
            let result = catch_unwind(AssertUnwindSafe(|| serve(stream, &mut *device)));
            self.control.set_connected(false);
            if let Ok(Err(error)) = &result {
                error!(name, %error, "the connection ended with an error");
            }
            if result.is_err() || !health.is_good() {
                error!(name, "the device panicked and is not served any more");
                self.control.set_dead();
            }
            save_counters(name, &self.paths, &self.control);
            let shutting_down = shutdown.remove_client(client);
            if result.is_err() || !health.is_good() {
                // The panic may have left the device inconsistent, and dropping it may panic too.
                let _ = catch_unwind(AssertUnwindSafe(|| drop(device)));
                return Ok(None);
            }
            if shutting_down || once {
                self.paths.clear();
                return Ok(shutting_down.then_some(device));
            }
        }
    }
}

/// Writes the counters to a new file and renames it, so that a reader never sees an incomplete file.
fn save_counters(name: &str, paths: &DevicePaths, control: &Control) {
    let Some(path) = &paths.counters else { return };
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let result = control.counters().and_then(|counters| {
        std::fs::write(&new, format!("{counters:#}\n"))
            .and_then(|()| std::fs::rename(&new, path))
            .map_err(|error| error.to_string())
    });
    if let Err(error) = result {
        error!(name, error, path = %path.display(), "cannot write the counters");
    }
}

#[derive(Debug, Default)]
struct State {
    requested: bool,
    next_id: u64,
    clients: BTreeMap<u64, UnixStream>,
}

/// Ends the connections of all clients before the process exits. QEMU survives a proper shutdown during an access, but
/// aborts if the socket is closed with an unread request.
#[derive(Debug, Default)]
pub struct ProcessShutdown {
    state: Mutex<State>,
    idle: Condvar,
}

impl ProcessShutdown {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a client that is about to be served, and returns its ID for [`Self::remove_client`].
    fn add_client(&self, stream: UnixStream) -> u64 {
        let mut state = self.lock();
        if state.requested {
            let _ = stream.shutdown(Shutdown::Both);
        }
        let client = state.next_id;
        state.next_id += 1;
        state.clients.insert(client, stream);
        client
    }

    /// Removes a client that has disconnected. Returns whether the end of the process was requested.
    fn remove_client(&self, client: u64) -> bool {
        let mut state = self.lock();
        state.clients.remove(&client);
        self.idle.notify_all();
        state.requested
    }

    /// Returns whether the end of the process was requested.
    pub fn is_requested(&self) -> bool {
        self.lock().requested
    }

    /// Starts the end of the process: shuts all connections down, and waits until none is served any more.
    fn begin(&self) {
        let mut state = self.lock();
        state.requested = true;
        for stream in state.clients.values() {
            // Fails only if the client has closed the connection already.
            let _ = stream.shutdown(Shutdown::Both);
        }
        let waited = self
            .idle
            .wait_timeout_while(state, SHUTDOWN_TIMEOUT, |state| !state.clients.is_empty());
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if !state.clients.is_empty() {
            error!(
                clients = state.clients.len(),
                "clients are still being served {} s after the signal",
                SHUTDOWN_TIMEOUT.as_secs()
            );
        }
    }

    /// On SIGTERM or SIGINT, ends all connections, calls [`DeviceServer::cleanup`] of `servers`, and exits.
    ///
    /// # Errors
    ///
    /// Signals cannot be handled.
    pub fn on_signals<'a>(self: &Arc<Self>, servers: impl IntoIterator<Item = &'a DeviceServer>) -> io::Result<()> {
        let cleanups: Vec<_> = servers.into_iter().map(DeviceServer::cleanup).collect();
        let mut signals = signal_hook::iterator::Signals::new([SIGTERM, SIGINT])?;
        let shutdown = Arc::clone(self);
        std::thread::Builder::new().name("signals".into()).spawn(move || {
            if signals.forever().next().is_none() {
                return;
            }
            shutdown.begin();
            cleanups.into_iter().for_each(|cleanup| cleanup());
            std::process::exit(0);
        })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::ControlTarget;
    use p2pmem_vfio_user::client::Client;
    use p2pmem_vfio_user::{Bus, ConfigBuilder, ConfigSpace, Region, Worker};
    use serde_json::{Value, json};
    use std::sync::mpsc;
    use std::time::Instant;

    struct FixedCounters;

    impl ControlTarget for FixedCounters {
        fn counters(&self) -> Result<Value, String> {
            Ok(json!({"things": 3}))
        }
        fn reset_counters(&self) -> Result<(), String> {
            Ok(())
        }
        fn state(&self) -> Result<Value, String> {
            Ok(json!({}))
        }
    }

    /// A device that panics when register 0 is written: on the serving thread for 0, otherwise on its worker.
    struct PanickingDevice {
        bus: Bus,
        config: ConfigSpace,
        region: Region,
        worker: Worker,
        panic_request: mpsc::Sender<()>,
    }

    impl PanickingDevice {
        fn new() -> Self {
            let bus = Bus::new(1);
            let (panic_request, panic_requests) = mpsc::channel();
            let worker = Worker::spawn("panicking", bus.clone(), move || {
                if panic_requests.recv().is_ok() {
                    panic!("deliberate panic of the worker");
                }
            });
            Self {
                bus,
                config: ConfigBuilder::new(1, 1).build().unwrap(),
                region: Region::registers(4096),
                worker: worker.unwrap(),
                panic_request,
            }
        }
    }

    impl Device for PanickingDevice {
        fn bus(&self) -> &Bus {
            &self.bus
        }
        fn config(&mut self) -> &mut ConfigSpace {
            &mut self.config
        }
        fn region(&self, index: u32) -> Option<&Region> {
            (index == 0).then_some(&self.region)
        }
        fn read(&mut self, _region: u32, _offset: u64, _data: &mut [u8]) {}
        fn write(&mut self, _region: u32, _offset: u64, data: &[u8]) {
            match data[0] {
                0 => panic!("deliberate panic of the serving thread"),
                _ => self.panic_request.send(()).unwrap(),
            }
        }
        fn reset(&mut self) {}
    }

    fn panic_ends_device(value: u8) {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let paths = DevicePaths {
            socket: path("device"),
            control: Some(path("control")),
            counters: Some(path("counters")),
        };
        let control = Control::new(Arc::new(FixedCounters));
        let server = DeviceServer::bind("panicking", paths, control.clone()).unwrap();
        let device = PanickingDevice::new();
        let health = device.worker.health();
        let shutdown = Arc::new(ProcessShutdown::default());
        let server = std::thread::spawn({
            let (health, shutdown) = (health.clone(), Arc::clone(&shutdown));
            // Converted to a trait object in the thread, because `dyn Device` is not `Send`.
            move || server.serve(Box::new(device), &health, &shutdown, false).map(drop)
        });
        let connect = || UnixStream::connect(path("device")).map(|stream| Client::new(stream).unwrap());
        let mut client = connect().unwrap();
        client.version().unwrap();
        drop(client);
        // When a client disconnects, the next one can connect.
        let mut client = connect().unwrap();
        client.version().unwrap();
        let state = |name: &str| control.handle_request(br#"{"get":"state"}"#)["state"][name].clone();
        assert_eq!((state("connected"), state("dead")), (json!(true), json!(false)));
        let _ = client.write(0, 0, &[value; 4]);
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut data = [0; 4];
        while client.read(0, 0, &mut data).is_ok() {
            assert!(Instant::now() < deadline, "the connection does not end");
        }
        server.join().unwrap().unwrap();
        assert_eq!((state("connected"), state("dead")), (json!(false), json!(true)));
        assert!(connect().is_err(), "the socket of a device that panicked still listens");
        assert!(
            UnixStream::connect(path("control")).is_ok(),
            "the control socket of a device that panicked does not listen"
        );
        let counters: Value = serde_json::from_slice(&std::fs::read(path("counters")).unwrap()).unwrap();
        assert_eq!(counters, json!({"things": 3}));
    }

    #[test]
    fn device_panic_ends_device() {
        panic_ends_device(0);
    }

    #[test]
    fn worker_panic_ends_device() {
        panic_ends_device(1);
    }

    #[test]
    fn bind_error_names_the_socket() {
        let paths = DevicePaths {
            socket: "/nonexistent/device".into(),
            control: None,
            counters: None,
        };
        let error = DeviceServer::bind("x", paths, Control::new(Arc::new(FixedCounters))).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/device"));
    }
}
