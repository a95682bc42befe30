// SPDX-License-Identifier: MIT OR Apache-2.0

//! Tests of the pages in headless Chromium: each test has its own storage node, browser, and server.

#[path = "../../../p2pmem-web/tests/harness/browser.rs"]
mod browser;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use browser::{has, Browser, ENTER, ESCAPE, LEFT};
use p2pmem::fake::{write_pci_function, Fake};
use p2pmem::{Buffer, Device, PathClass, Request};
use p2pmem_recorder::node::{DriveCounters, Node, NodeOptions, SessionHandle, SessionOptions, SimulatedDrives};
use p2pmem_recorder::status::{Direction, Limit, SessionDevices};
use p2pmem_recorder::store::{Block, ChannelName, Files, LunOptions, StreamOptions, Writer};
use p2pmem_recorder::web::{serve, Machine, Server, WebOptions};

const TOKEN: &str = "a token of the tests";
const MIB: u64 = 1 << 20;

/// A storage node with drives, which are folders: the drives `nvme0` and `nvme1` are below a switch with an accelerator and
/// the NIC `mlx5_0`, the drives `nvme2` and `nvme3` below one with an accelerator and `mlx5_1`.
struct Bed {
    folder: PathBuf,
    node: Arc<Node>,
    server: Server,
    simulation: Arc<Simulation>,
    /// The device of the providers.
    device: Device,
    /// The folder of the machine's files.
    base: tempfile::TempDir,
}

/// The counters of the simulated drives, by the last digit of their folders.
#[derive(Default)]
struct Simulation {
    written: [AtomicU64; 4],
    in_flight: [AtomicU64; 4],
    /// Bytes of LUNs on each drive.
    used: [AtomicU64; 4],
}

const DRIVE_SIZE: u64 = 3_840_000_000_000;

impl Simulation {
    fn counters(&self, folder: &Path) -> DriveCounters {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let number: usize = name[name.len() - 1..].parse().unwrap();
        let load = |counters: &[AtomicU64; 4]| counters[number].load(Ordering::Relaxed);
        DriveCounters {
            device: Some(format!("{name}n1")),
            size: DRIVE_SIZE,
            free: DRIVE_SIZE - load(&self.used),
            written: load(&self.written),
            read: 0,
            in_flight: load(&self.in_flight),
        }
    }
}

/// The PCI functions of the side with this number.
fn devices(side: usize) -> SessionDevices {
    let bus = 0x80 * side;
    let addr = |number: usize| format!("0000:{:02x}:00.0", bus + number).parse().unwrap();
    SessionDevices {
        nic: Some(addr(5)),
        memory: Some(addr(4)),
        drives: vec![addr(6), addr(7)],
    }
}

/// Writes the files of a machine with two sides below `root`. Returns the device with its providers.
fn machine(root: &Path) -> Fake {
    let sys = root.join("sys");
    let mut fake = Fake::new();
    for side in 0..2 {
        let bus = 0x80 * side;
        let add = |path: &str, class: &str, driver: &str, names: &[String]| {
            let node = side.to_string();
            let files = [
                ("vendor", "0x1de5"),
                ("device", "0x0001"),
                ("class", class),
                ("numa_node", node.as_str()),
            ];
            let folder = write_pci_function(&sys, path, &files).unwrap();
            for name in names {
                std::fs::create_dir_all(folder.join(name)).unwrap();
            }
            std::os::unix::fs::symlink(format!("../drivers/{driver}"), folder.join("driver")).unwrap();
        };
        let root = format!("pci0000:{bus:02x}/0000:{bus:02x}:01.0");
        let switch = format!("{root}/0000:{:02x}:00.0", bus + 1);
        add(&root, "0x060400", "pcieport", &[]);
        add(&switch, "0x060400", "pcieport", &[]);
        let nic = [format!("infiniband/mlx5_{side}"), format!("net/ens{}f0", side + 1)];
        let drive = |number: usize| [format!("nvme/nvme{}", 2 * side + number)];
        for (number, class, driver, names) in [
            (4, "0x120000", "p2pmem", Vec::new()),
            (5, "0x020700", "mlx5_core", nic.to_vec()),
            (6, "0x010802", "nvme", drive(0).to_vec()),
            (7, "0x010802", "nvme", drive(1).to_vec()),
        ] {
            let port = format!("{switch}/0000:{:02x}:{number:02x}.0", bus + 2);
            add(&port, "0x060400", "pcieport", &[]);
            add(&format!("{port}/0000:{:02x}:00.0", bus + number), class, driver, &names);
        }
        fake = fake.provider(devices(side).memory.unwrap(), 1 << 30);
    }
    fake
}

impl Bed {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_owned();
        Self::at(path, folder, 2)
    }

    /// Makes a node with folders for drives at `path`.
    fn at(path: PathBuf, folder: tempfile::TempDir, drives: usize) -> Self {
        let simulation = Arc::new(Simulation::default());
        let drives: Vec<_> = (0..drives).map(|number| path.join(format!("nvme{number}"))).collect();
        for drive in &drives {
            std::fs::create_dir(drive).unwrap();
        }
        let mut options = NodeOptions::new("storage-1", drives);
        options.cached = true;
        let counters = Arc::clone(&simulation);
        options.simulated = Some(SimulatedDrives::new(move |folder| counters.counters(folder)));
        let node = Node::open(options).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let root = folder.path().join("machine");
        let fake = machine(&root);
        let device = fake.device();
        let options = WebOptions::new(TOKEN).machine(Machine::new(root, move || Ok(fake.device())));
        let server = serve(Arc::clone(&node), listener, &options).unwrap();
        Self {
            folder: path,
            node,
            server,
            simulation,
            device,
            base: folder,
        }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.server.address())
    }

    fn drive(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Creates the LUN `fast` with the stream `radar`.
    fn create_lun(&self) {
        let lun = LunOptions::new(["nvme0", "nvme1"].map(|name| self.drive(name)))
            .segment_size(MIB)
            .segments(4);
        self.node.create_lun("fast", &lun).unwrap();
        let stream = StreamOptions::new(64 << 10).channels(2);
        self.node.create_stream("fast", "radar", &stream).unwrap();
    }

    /// Records some blocks on a channel.
    fn record(&self, channel: u32) {
        self.record_blocks(&ChannelName::new("fast", "radar", channel), 3);
    }

    /// Records blocks without payload.
    fn record_blocks(&self, channel: &ChannelName, count: u64) {
        let time = 1_700_000_000_000_000_000;
        let mut writer = self.node.store().writer(channel, time).unwrap();
        for sequence in 0..count {
            let block = Block {
                sequence,
                time: time + sequence,
                checksum: 0,
            };
            writer.write(block, |_, _| Ok::<_, std::io::Error>(())).unwrap();
            if sequence % 4096 == 0 {
                assert!(writer.commit().failures.is_empty());
            }
        }
        assert!(writer.commit().failures.is_empty());
    }

    /// Begins a session of the LUN `fast` by the NIC `mlx5_0`.
    fn begin(&self, direction: Direction, channel: u32) -> SessionHandle {
        self.begin_on(0, direction, ChannelName::new("fast", "radar", channel), MIB)
    }

    /// Begins a session on one side of the machine.
    fn begin_on(&self, side: usize, direction: Direction, channel: ChannelName, block_size: u64) -> SessionHandle {
        let devices = devices(side);
        self.node.begin_session(SessionOptions {
            direction,
            channel,
            recording: 0,
            peer: "accelerators-1".into(),
            nic: format!("mlx5_{side}"),
            memory: format!("{}, {}", devices.memory.unwrap(), PathClass::SameSwitch.meaning()),
            devices,
            block_size,
            buffers: 16,
        })
    }

    /// Opens a browser and logs in.
    async fn browser(&self) -> Browser {
        Browser::start_logged_in(&self.url("/"), TOKEN).await
    }
}

fn gone(selector: &str) -> String {
    format!("!document.querySelector({selector:?})")
}

#[tokio::test]
async fn login_needs_the_token() {
    let bed = Bed::new();
    let browser = Browser::start().await;
    browser.goto(&bed.url("/")).await;
    browser.wait("location.pathname === '/login'").await;
    assert!(
        browser.is("document.activeElement.matches('#token')").await,
        "the field has the focus"
    );
    browser.press("a wrong token").await;
    browser.press(ENTER).await;
    browser.wait(&has("[role=alert]", "the token is wrong")).await;
    assert_eq!(browser.violations().await, "", "page of the login");
    browser.log_in(TOKEN).await;
    browser.wait(&has("h1", "storage-1")).await;
    assert!(
        !browser.is("document.cookie.includes('login')").await,
        "scripts cannot read the cookie"
    );
    browser.focus_by_tab("form[action='/logout'] button").await;
    browser.press(ENTER).await;
    browser.wait("location.pathname === '/login'").await;
    browser.goto(&bed.url("/")).await;
    browser.wait("location.pathname === '/login'").await;
    browser.close().await;
}

#[tokio::test]
async fn luns_and_streams_are_managed_with_the_keyboard() {
    let bed = Bed::new();
    let browser = bed.browser().await;
    browser.wait("!document.querySelector('#no-lun').hidden").await;

    browser.focus_by_tab("#new-lun > summary").await;
    browser.press(ENTER).await;
    browser.focus_by_tab("#lun-name").await;
    browser.press("fast").await;
    // Both drives are selected: the second is not needed.
    let second = format!("input[value={:?}]", bed.drive("nvme1"));
    browser.focus_by_tab(&second).await;
    browser.press(" ").await;
    browser.focus_by_tab("#lun-segment").await;
    browser.replace("2").await;
    browser.focus_by_tab("#lun-segments").await;
    browser.replace("3").await;
    browser.wait(&has("#lun-size", "6 MiB in all")).await;
    browser.press(ENTER).await;
    browser.wait(&has("[data-lun=fast]", "6 of 6 MiB free")).await;
    let lun = bed.node.store().lun("fast").unwrap();
    assert_eq!(lun.drives.len(), 1);
    assert_eq!((lun.segment_size, lun.segments), (2 * MIB, 3));
    browser.wait(&has("#announcement", "fast is being created")).await;

    // The same name again: the form shows the reason.
    browser.focus_by_tab("#new-lun > summary").await;
    browser.press(ENTER).await;
    browser.focus_by_tab("#lun-name").await;
    browser.press("fast").await;
    browser.press(ENTER).await;
    browser
        .wait(&has("#lun-form [role=alert]", "fast exists; choose another name"))
        .await;

    browser.focus_by_tab("[data-lun=fast] > details > summary").await;
    browser.press(ENTER).await;
    browser.focus_by_tab("[data-lun=fast] [name=name]").await;
    browser.press("radar").await;
    browser.focus_by_tab("[data-lun=fast] [name=channels]").await;
    browser.replace("2").await;
    browser.focus_by_tab("[data-lun=fast] [type=submit]").await;
    browser.press(ENTER).await;
    browser
        .wait(&has("[data-stream='fast/radar']", "2 channels, blocks of 1 MiB"))
        .await;
    let streams = bed.node.store().streams("fast").unwrap();
    assert_eq!((streams[0].block_size, streams[0].channels), (MIB, 2));
    browser.close().await;
}

#[tokio::test]
async fn deleting_asks_for_confirmation() {
    let bed = Bed::new();
    bed.create_lun();
    bed.record(0);
    let browser = bed.browser().await;
    let recordings = "[data-stream='fast/radar'] details";
    browser.wait(&has(recordings, "1 recording")).await;
    browser.focus_by_tab(&format!("{recordings} > summary")).await;
    browser.press(ENTER).await;
    browser.focus_by_tab(&format!("{recordings} button")).await;
    browser.press(ENTER).await;
    browser.wait("document.querySelector('#confirm').open").await;
    assert!(
        browser
            .is(&has("#confirm", "Delete recording 0 of fast/radar/0?"))
            .await
    );
    assert!(
        browser.is("document.activeElement.matches('#confirm-no')").await,
        "Cancel has the focus"
    );
    assert_eq!(browser.violations().await, "", "dialog");
    browser.press(ESCAPE).await;
    browser.wait("!document.querySelector('#confirm').open").await;
    let channel = ChannelName::new("fast", "radar", 0);
    assert_eq!(bed.node.store().recordings(&channel).unwrap().len(), 1);
    assert!(
        browser
            .is(&format!(
                "document.activeElement.matches({:?})",
                format!("{recordings} button")
            ))
            .await
    );

    browser.press(ENTER).await;
    browser.wait("document.querySelector('#confirm').open").await;
    browser.press(ENTER).await;
    browser.wait("!document.querySelector('#confirm').open").await;
    assert_eq!(bed.node.store().recordings(&channel).unwrap().len(), 1, "Enter cancels");

    browser.press(ENTER).await;
    browser.focus_by_tab("#confirm-yes").await;
    browser.press(ENTER).await;
    browser.wait(&has(recordings, "0 recordings")).await;
    // Then the focus is on the heading.
    browser
        .wait(&has("#announcement", "recording 0 of fast/radar/0 was deleted"))
        .await;
    assert_eq!(bed.node.store().recordings(&channel).unwrap().len(), 0);

    // A LUN that is in use stays, and the page says why.
    let writer = bed.node.store().writer(&channel, 0).unwrap();
    browser.focus_by_tab("[data-lun=fast] > .title button").await;
    browser.press(ENTER).await;
    browser.focus_by_tab("#confirm-yes").await;
    browser.press(ENTER).await;
    browser
        .wait(&has(
            "[data-lun=fast] > .message",
            "fast is in use; stop its writers and readers first",
        ))
        .await;
    drop(writer);
    browser.focus_by_tab("[data-lun=fast] > .title button").await;
    browser.press(ENTER).await;
    browser.focus_by_tab("#confirm-yes").await;
    browser.press(ENTER).await;
    browser.wait(&gone("[data-lun=fast]")).await;
    assert!(bed.node.store().luns().is_empty());
    browser.wait("document.activeElement.matches('#luns-title')").await;
    browser.close().await;
}

#[tokio::test]
async fn sessions_show_live_figures_and_stop() {
    let bed = Bed::new();
    bed.create_lun();
    let browser = bed.browser().await;
    browser.wait("!document.querySelector('#no-session').hidden").await;
    let session = bed.begin(Direction::Record, 0);
    session.progress(3, Limit::Peer);
    let card = "[data-session='0']";
    browser.wait(&has(card, "Record fast/radar/0, recording 0")).await;
    browser.wait(&has(card, "The accelerator node limits the rate")).await;
    for text in [
        "accelerators-1",
        "mlx5_0",
        "0000:04:00.0, one PCIe switch: traffic stays in it",
        "nvme0n1, nvme1n1",
        "3 of 16",
        "0 × 1 MiB",
    ] {
        browser.wait(&has(card, text)).await;
    }

    // Blocks arrive until the page shows a rate.
    let rate = "parseFloat(document.querySelector(\"[data-session='0'] dd\").textContent) > 0";
    browser
        .wait_while(rate, || {
            session.arrived();
            session.acknowledged(1);
        })
        .await;
    session.progress(14, Limit::Drive);
    browser
        .wait(&has(card, "The drives limit the rate: buffers wait for"))
        .await;
    browser.wait(&has(card, "14 of 16")).await;
    assert!(browser.is(&has(&format!("{card} .limit"), "(queue depth ")).await);
    assert!(
        browser
            .is("document.querySelector('#port-chart').ariaLabel.includes('now: mlx5_0 record')")
            .await
    );
    assert!(
        browser
            .is("document.querySelectorAll('.chart canvas').length === 2")
            .await
    );
    assert!(browser.is(&has("#port-list", "mlx5_0")).await);
    assert!(browser.is(&has("#summary", "Dropped blocks0")).await);

    browser.focus_by_tab(&format!("{card} button")).await;
    browser.press(ENTER).await;
    browser.wait(&has("#announcement", "Session 0 is stopping")).await;
    assert!(session.is_stopped());
    // A block that is not durable when the session ends is dropped.
    session.arrived();
    session.failed("the other side did not answer for 30 s");
    drop(session);
    browser.wait(&gone(card)).await;
    browser.wait(&has("[data-ended='0']", "did not answer for 30 s")).await;
    browser.wait(&has("#summary", "Dropped blocks1")).await;
    let problem = "Session 0, Record fast/radar/0: the other side did not answer";
    browser.wait(&has("#problems", problem)).await;
    // The next session of the channel works.
    let _next = bed.begin(Direction::Record, 0);
    browser.wait(&format!("!({})", has("#problems", problem))).await;
    assert!(browser.is(&has("[data-ended='0']", "did not answer for 30 s")).await);
    browser.close().await;
}

#[tokio::test]
async fn an_error_of_a_drive_is_shown_until_it_is_acknowledged_or_another_session_succeeds() {
    let bed = Bed::new();
    bed.create_lun();
    let session = bed.begin(Direction::Record, 0);
    let browser = bed.browser().await;
    browser.wait(&has("[data-session='0']", "Record")).await;
    assert!(browser.is("document.querySelector('#problems').hidden").await);
    let folder = bed.drive("nvme1");
    let fails = || {
        let error = std::io::Error::from_raw_os_error(5);
        let consequence = "its blocks go to nvme0n1";
        bed.node.drive_failed(&session, &folder, &error, consequence);
    };
    fails();
    let name = folder.to_str().unwrap();
    for text in [
        &format!("Drive nvme1n1 at {name} failed in session 0 (record fast/radar/0) at 20"),
        "Input/output error (os error 5); its blocks go to nvme0n1",
    ] {
        browser.wait(&has("#problem-list", text)).await;
    }
    browser.wait(&has("#announcement", "Problem: Drive")).await;
    browser
        .wait(&has(&format!("[data-drive={name:?}]"), "Error: Input/output error"))
        .await;
    browser
        .wait(&has(
            "[data-session='0'] .warnings",
            &format!("nvme1n1 at {name} failed"),
        ))
        .await;
    let other = bed.drive("nvme0");
    assert!(!browser.is(&has(&format!("[data-drive={other:?}]"), "Error")).await);

    browser.focus_by_tab("#problem-list button").await;
    browser.press(ENTER).await;
    browser.wait("document.querySelector('#problems').hidden").await;
    browser
        .wait(&has("#announcement", "The error of nvme1n1 is acknowledged"))
        .await;
    assert_eq!(bed.node.status().drives[1].error, None);
    assert!(browser.is("document.activeElement.matches('#main')").await);
    assert!(
        browser.is(&has("[data-session='0'] .warnings", "nvme1n1")).await,
        "the session keeps it"
    );

    // Another session uses the drive.
    fails();
    browser.wait("!document.querySelector('#problems').hidden").await;
    let next = bed.begin(Direction::Record, 1);
    bed.node.drive_worked(&next, &folder);
    browser.wait("document.querySelector('#problems').hidden").await;
    browser.close().await;
}

#[tokio::test]
async fn the_reason_why_a_session_ended_names_the_drive() {
    let bed = Bed::new();
    bed.create_lun();
    let browser = bed.browser().await;
    let session = bed.begin(Direction::Play, 0);
    browser.wait(&has("[data-session='0']", "Play")).await;
    let drive = bed.node.describe_drive(&bed.drive("nvme1"));
    session.failed(format!("reading block 5 from the drive {drive}: Input/output error"));
    drop(session);
    browser.wait(&has("[data-ended='0']", &drive)).await;
    browser
        .wait(&has(
            "#problem-list",
            &format!("reading block 5 from the drive {drive}"),
        ))
        .await;
    browser.close().await;
}

#[tokio::test]
async fn the_topology_shows_the_chosen_memory_of_running_sessions() {
    let bed = Bed::new();
    bed.create_lun();
    let browser = bed.browser().await;
    browser.wait("document.querySelector('#topology-drawing svg')").await;
    let drawing = "#topology-drawing svg";
    for text in [
        "mlx5_0, ens1f0 (InfiniBand NIC)",
        "nvme1 (NVMe drive)",
        "PCIe switch",
        "provider 1: 0B of 1G used",
    ] {
        assert!(browser.is(&has(drawing, text)).await, "{text}");
        // The list has the same.
        assert!(browser.is(&has("#topology-list", text)).await, "{text}");
    }
    assert!(
        !browser
            .is(&format!("document.querySelector({:?})", format!("{drawing} .chosen")))
            .await
    );
    assert!(!browser.is("document.querySelector('#no-path').hidden").await);

    let first = bed.begin(Direction::Record, 0);
    browser.wait(&has(drawing, "chosen for session 0")).await;
    let second = bed.begin_on(1, Direction::Play, ChannelName::new("fast", "radar", 1), MIB);
    browser.wait(&has(drawing, "chosen for session 1")).await;
    for (number, path) in [
        "Session 0, record fast/radar/0: mlx5_0 → memory of 0000:04:00.0 → nvme0, nvme1",
        "Session 1, play fast/radar/1: nvme2, nvme3 → memory of 0000:84:00.0 → mlx5_1",
    ]
    .iter()
    .enumerate()
    {
        browser
            .wait(&has(&format!("#topology-paths li:nth-child({})", number + 1), path))
            .await;
        assert!(browser.is(&has("#topology-list strong", "chosen for session 0")).await);
    }
    assert!(
        browser
            .is("document.querySelectorAll('#topology-drawing rect.chosen').length === 3")
            .await
    );
    assert!(
        browser
            .is("document.querySelectorAll('#topology-drawing .head').length === 5")
            .await
    );

    // On a phone, the box shows the devices, and scrolls with the keyboard.
    browser.appear(360, false).await;
    let left = "document.querySelector('#topology-drawing').scrollLeft";
    browser.wait(&format!("{left} > 300")).await;
    browser.focus_by_tab("#topology-drawing").await;
    let before = browser.value(left).await;
    browser.press(LEFT).await;
    browser.wait(&format!("{left} < {before}")).await;
    assert_eq!(browser.wider_than_page().await, "");

    drop(first);
    browser.wait(&format!("!({})", has(drawing, "session 0"))).await;
    drop(second);
    browser.wait("!document.querySelector('#no-path').hidden").await;
    browser
        .wait(&format!("!document.querySelector({:?})", format!("{drawing} .chosen")))
        .await;

    // Without a topology, the page says why instead of showing an old one.
    std::fs::remove_dir_all(bed.base.path().join("machine/sys")).unwrap();
    let _third = bed.begin(Direction::Record, 0);
    browser
        .wait(&has("#topology-message", "cannot read the topology: "))
        .await;
    assert!(browser.is("document.querySelector('#topology-drawing').hidden").await);
    assert!(
        browser
            .is("document.querySelector('#topology-list').children.length === 0")
            .await
    );
    browser.close().await;
}

#[tokio::test]
async fn a_lost_connection_is_shown_and_ends_at_the_login() {
    let bed = Bed::new();
    let browser = bed.browser().await;
    let address = bed.server.address();
    bed.server.stop();
    browser.wait(&has("#connection", "Connection lost")).await;
    // The new server does not know the login of the old one.
    let listener = TcpListener::bind(address).unwrap();
    let server = serve(Arc::clone(&bed.node), listener, &WebOptions::new(TOKEN)).unwrap();
    browser.wait("location.pathname === '/login'").await;
    browser.log_in(TOKEN).await;
    browser.wait(&has("#connection", "Live")).await;
    browser.close().await;
    drop(server);
}

#[tokio::test]
async fn pages_fit_and_are_accessible_in_light_and_dark() {
    let bed = Bed::new();
    bed.create_lun();
    bed.record(0);
    bed.record(1);
    let ended = bed.begin(Direction::Play, 1);
    ended.failed("the other side did not answer for 30 s");
    drop(ended);
    let session = bed.begin(Direction::Record, 0);
    session.progress(14, Limit::Drive);
    let browser = bed.browser().await;
    // Three rates make a line in the chart.
    for _ in 0..3 {
        browser
            .run("document.querySelector('#port-chart').removeAttribute('aria-label')")
            .await;
        let shown = "parseFloat(document.querySelector(\"[data-session='1'] dd\").textContent) > 0 && document.querySelector('#port-chart[aria-label] canvas')";
        let work = || {
            for _ in 0..10 {
                session.arrived();
                session.acknowledged(1);
            }
        };
        browser.wait_while(shown, work).await;
    }
    let error = std::io::Error::from_raw_os_error(5);
    bed.node
        .drive_failed(&session, &bed.drive("nvme1"), &error, "its blocks go to nvme0n1");
    browser.wait(&has("#problem-list", "Input/output error")).await;
    browser
        .wait(&has("#topology-drawing svg", "chosen for session 1"))
        .await;

    let mut pages = Vec::new();
    for (name, width, dark) in [
        ("light", 1200, false),
        ("dark", 1200, true),
        ("phone", 360, false),
        ("phone-dark", 360, true),
    ] {
        browser.appear(width, dark).await;
        browser
            .run("for (const part of document.querySelectorAll('details')) part.open = true")
            .await;
        browser.check_appearance(name).await;
        browser
            .run("for (const part of document.querySelectorAll('details')) part.open = false")
            .await;
        pages.push(browser.value("getComputedStyle(document.body).backgroundColor").await);
    }
    assert_ne!(pages[0], pages[1]);
    assert_eq!(pages[0], pages[2]);

    browser.check_origin(&bed.url("/")).await;
    browser.close().await;
}

/// A recording of the simulation.
struct Source {
    bed: Arc<Bed>,
    side: usize,
    session: SessionHandle,
    /// The memory of the session.
    _buffer: Buffer,
    writer: Writer<Files>,
    /// Bytes in a second.
    rate: f64,
    buffers: usize,
    limit: Limit,
    begin: Instant,
    blocks: u64,
}

const PICTURE_BLOCK: u64 = 8 * MIB;

impl Source {
    fn new(bed: &Arc<Bed>, side: usize, channel: ChannelName, rate: f64, buffers: usize, limit: Limit) -> Self {
        let request = Request::new(16 * PICTURE_BLOCK).provider(side as u32 + 1);
        Self {
            bed: Arc::clone(bed),
            side,
            _buffer: bed.device.alloc(&request).unwrap(),
            writer: bed.node.store().writer(&channel, 1_700_000_000_000_000_000).unwrap(),
            session: bed.begin_on(side, Direction::Record, channel, PICTURE_BLOCK),
            rate,
            buffers,
            limit,
            begin: Instant::now(),
            blocks: 0,
        }
    }

    /// Records the blocks that are due, without their payload.
    fn advance(&mut self) {
        let time = self.begin.elapsed().as_secs_f64();
        let bytes = self.rate * (time + 0.3 * (time / 4.0).sin());
        while self.blocks * PICTURE_BLOCK < bytes as u64 {
            let block = Block {
                sequence: self.blocks,
                time: 1_700_000_000_000_000_000,
                checksum: 0,
            };
            self.writer.write(block, |_, _| Ok::<_, std::io::Error>(())).unwrap();
            self.blocks += 1;
            self.session.arrived();
        }
        self.session
            .acknowledged(self.writer.commit().acknowledged.len() as u64);
        self.session.progress(self.buffers, self.limit);
        for (drive, percent) in [(2 * self.side, 52), (2 * self.side + 1, 48)] {
            let written = self.blocks * PICTURE_BLOCK * percent / 100;
            self.bed.simulation.written[drive].store(written, Ordering::Relaxed);
            self.bed.simulation.in_flight[drive].store(self.buffers as u64 / 2, Ordering::Relaxed);
        }
    }
}

/// Makes the pictures of the guide, `recorder-*.png`, in `build/reports`. `make recorder-pictures` lets the charts fill:
/// `P2PMEM_PICTURE_RATES` is the number of rates that they show, `P2PMEM_PICTURE_FOLDER` the folder of the drives.
#[tokio::test]
async fn pictures_show_a_node_that_works() {
    let folder = tempfile::tempdir().unwrap();
    let path = std::env::var_os("P2PMEM_PICTURE_FOLDER").map_or_else(|| folder.path().to_owned(), PathBuf::from);
    let bed = Arc::new(Bed::at(path, folder, 4));
    for (name, drives, segments) in [("fast", 0..2, 128), ("wide", 2..4, 256)] {
        let folders = drives.clone().map(|number| bed.drive(&format!("nvme{number}")));
        let lun = LunOptions::new(folders).segment_size(4 << 30).segments(segments);
        bed.node.create_lun(name, &lun).unwrap();
        for drive in drives {
            bed.simulation.used[drive].store(segments << 32, Ordering::Relaxed);
        }
    }
    let stream = |channels| StreamOptions::new(PICTURE_BLOCK).channels(channels);
    bed.node.create_stream("fast", "radar", &stream(2)).unwrap();
    bed.node.create_stream("wide", "radar", &stream(2)).unwrap();
    bed.node.create_stream("wide", "telescope", &stream(8)).unwrap();
    let name = |lun: &str, stream: &str, channel| ChannelName::new(lun, stream, channel);
    bed.record_blocks(&name("fast", "radar", 1), 20_000);
    bed.record_blocks(&name("wide", "telescope", 0), 40_000);
    bed.record_blocks(&name("wide", "telescope", 5), 30_000);
    drop(bed.begin_on(0, Direction::Play, name("fast", "radar", 1), PICTURE_BLOCK));
    let browser = bed.browser().await;
    let mut sources = [
        Source::new(&bed, 0, name("fast", "radar", 0), 5.8e9, 4, Limit::Peer),
        Source::new(&bed, 1, name("wide", "radar", 0), 4.3e9, 12, Limit::Drive),
    ];
    let ends = Arc::new(AtomicBool::new(false));
    let has_ended = Arc::clone(&ends);
    let works = std::thread::spawn(move || {
        while !has_ended.load(Ordering::Relaxed) {
            sources.iter_mut().for_each(Source::advance);
            // The pace of the simulation. Nothing waits for it.
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let rates = std::env::var("P2PMEM_PICTURE_RATES").map_or(3, |rates| rates.parse().unwrap());
    for _ in 0..rates {
        browser
            .run("document.querySelector('#port-chart').removeAttribute('aria-label')")
            .await;
        browser
            .wait("document.querySelector('#port-chart[aria-label] canvas')")
            .await;
    }
    browser
        .wait(&has("#topology-drawing svg", "chosen for session 2"))
        .await;
    for text in ["Sessions2", "Dropped blocks0", "of 3 TiB"] {
        browser.wait(&has("#summary", text)).await;
    }
    assert!(browser.is("document.querySelector('#problems').hidden").await);

    for (name, width, dark) in [("light", 1000, false), ("dark", 1000, true), ("phone", 360, false)] {
        browser.appear(width, dark).await;
        let (top, below) = (
            "document.body",
            "document.querySelector('[aria-labelledby=topology-title]')",
        );
        if width > 600 {
            browser.picture_between(&format!("recorder-{name}"), top, below).await;
            browser.picture(&format!("recorder-topology-{name}"), below).await;
            browser
                .picture(
                    &format!("recorder-luns-{name}"),
                    "document.querySelector('[aria-labelledby=luns-title]')",
                )
                .await;
        } else {
            browser
                .picture_between(
                    &format!("recorder-{name}"),
                    top,
                    "document.querySelector('[aria-labelledby=rates-title]')",
                )
                .await;
            browser.picture(&format!("recorder-topology-{name}"), below).await;
        }
    }
    ends.store(true, Ordering::Relaxed);
    works.join().unwrap();
    browser.close().await;
}

#[tokio::test]
async fn focus_is_visible_on_every_control() {
    let bed = Bed::new();
    bed.create_lun();
    let _session = bed.begin(Direction::Record, 0);
    let browser = bed.browser().await;
    browser.wait(&has("[data-session='0']", "Record")).await;
    browser.wait("document.querySelector('#topology-drawing svg')").await;
    browser.run("document.querySelector('#new-lun').open = true").await;
    let seen = browser
        .focus_every_control("a, button, input, select, summary, #topology-drawing", 60)
        .await;
    assert!(seen >= 12, "{seen} controls");
    browser.close().await;
}
