// SPDX-License-Identifier: MIT OR Apache-2.0

//! A headless Chromium, by WebDriver. The browser ends with the value, also after a failed test. The browser tests of several
//! crates include this file.

// Each crate uses a part of it.
#![allow(dead_code)]

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use fantoccini::wd::TimeoutConfiguration;
use fantoccini::{Client, ClientBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::{json, Value};

/// The longest wait for a condition. Browsers are slow on a busy machine.
const BOUND: Duration = Duration::from_secs(60);

const TAB: &str = "\u{E004}";
pub const ENTER: &str = "\u{E007}";
pub const ESCAPE: &str = "\u{E00C}";
pub const LEFT: &str = "\u{E012}";
const SHIFT: char = '\u{E008}';
const END: char = '\u{E010}';
const HOME: char = '\u{E011}';

/// Returns a condition: an element has a text.
pub fn has(selector: &str, text: &str) -> String {
    format!("document.querySelector({selector:?})?.textContent.includes({text:?})")
}

/// The driver's process. Dropping it ends the browser and the driver.
struct Driver {
    process: Child,
    port: u16,
    session: Option<String>,
}

impl Driver {
    /// Starts a driver. It chooses a port for IPv4 and IPv6, and ends if another process takes the port first.
    fn start() -> Self {
        let mut output = String::new();
        for _ in 0..10 {
            let mut driver = Self {
                process: Command::new("chromedriver")
                    .arg("--port=0")
                    .stdout(Stdio::piped())
                    .spawn()
                    .expect("chromedriver is missing (Debian: apt-get install chromium chromium-driver)"),
                port: 0,
                session: None,
            };
            let lines = BufReader::new(driver.process.stdout.take().unwrap()).lines();
            for line in lines.map_while(Result::ok) {
                if let Some((_, port)) = line.split_once("successfully on port ") {
                    driver.port = port.trim_end_matches('.').parse().unwrap();
                    return driver;
                }
                output += &format!("{line}\n");
            }
        }
        panic!("chromedriver did not start:\n{output}");
    }

    /// Sends a request that the WebDriver crate does not have.
    fn call(&self, method: &str, path: &str, body: &Value) -> io::Result<Value> {
        let session = self.session.as_deref().unwrap_or_default();
        let body = body.to_string();
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        stream.set_read_timeout(Some(BOUND))?;
        let head = format!(
            "{method} /session/{session}{path} HTTP/1.1\r\nHost: 127.0.0.1:{}\r\nContent-Length: {}\r\n\r\n",
            self.port,
            body.len()
        );
        stream.write_all((head + &body).as_bytes())?;
        // The driver keeps the connection open.
        let mut reader = BufReader::new(stream);
        let (mut status, mut line, mut length) = (String::new(), String::new(), 0);
        reader.read_line(&mut status)?;
        while reader.read_line(&mut line)? > 0 && line.trim() != "" {
            if let Some((_, value)) = line
                .split_once(':')
                .filter(|(name, _)| name.eq_ignore_ascii_case("content-length"))
            {
                length = value.trim().parse().map_err(io::Error::other)?;
            }
            line.clear();
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        if !status.starts_with("HTTP/1.1 200") {
            return Err(io::Error::other(format!(
                "{status}: {}",
                String::from_utf8_lossy(&body)
            )));
        }
        Ok(serde_json::from_slice::<Value>(&body)?["value"].take())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // The browser ends with its session. A failure here must not hide that of a test.
        if self.session.is_some() {
            drop(self.call("DELETE", "", &json!({})));
        }
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

pub struct Browser {
    client: Client,
    driver: Driver,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Starts a browser, which cannot reach other machines.
    pub async fn start() -> Self {
        let mut driver = Driver::start();
        let profile = tempfile::tempdir().unwrap();
        let mut arguments = vec![
            "--headless=new".to_owned(),
            "--disable-gpu".to_owned(),
            // Characters without colored edges, which pictures show.
            "--disable-lcd-text".to_owned(),
            "--disable-dev-shm-usage".to_owned(),
            "--no-first-run".to_owned(),
            "--window-size=1200,1000".to_owned(),
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1".to_owned(),
            format!("--user-data-dir={}", profile.path().display()),
        ];
        if rustix::process::geteuid().is_root() {
            // The sandbox of Chromium does not work for root. The test opens only pages of its own server.
            arguments.push("--no-sandbox".to_owned());
        }
        let capabilities = json!({
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        });
        let client = ClientBuilder::new(HttpConnector::new())
            .capabilities(capabilities.as_object().unwrap().clone())
            .connect(&format!("http://127.0.0.1:{}", driver.port))
            .await
            .expect("Chromium did not start (Debian: apt-get install chromium)");
        driver.session = client.session_id().await.unwrap();
        let timeouts = TimeoutConfiguration::new(Some(BOUND), Some(BOUND), None);
        client.update_timeouts(timeouts).await.unwrap();
        Self {
            client,
            driver,
            _profile: profile,
        }
    }

    /// Ends the browser.
    /// Starts a browser at a page that needs a login, logs in, and waits for live values.
    pub async fn start_logged_in(url: &str, token: &str) -> Self {
        let browser = Self::start().await;
        browser.goto(url).await;
        browser.log_in(token).await;
        browser
            .wait("document.querySelector('#connection')?.textContent === 'Live'")
            .await;
        browser
    }

    /// Logs in on the page of the login, by the keyboard.
    pub async fn log_in(&self, token: &str) {
        self.focus_by_tab("#token").await;
        self.press(token).await;
        self.press(ENTER).await;
    }

    /// Checks that no part is wider than the page, and that the page is accessible.
    pub async fn check_appearance(&self, name: &str) {
        assert_eq!(
            self.wider_than_page().await,
            "",
            "{name}: parts are wider than the page"
        );
        assert_eq!(self.violations().await, "", "{name}");
    }

    /// Checks that the page has loaded everything from its own server, and that the browser printed no message.
    pub async fn check_origin(&self, origin: &str) {
        let requests = self
            .value("performance.getEntriesByType('resource').map((entry) => entry.name)")
            .await;
        let requests = requests.as_array().unwrap();
        assert!(requests.len() >= 4, "{requests:?}");
        for request in requests {
            assert!(request.as_str().unwrap().starts_with(origin), "{request}");
        }
        assert_eq!(self.console(), Vec::<String>::new(), "messages of the browser");
    }

    /// Moves the focus by the key Tab through the controls that match `selector`, and checks that it is visible on each.
    /// Returns their number, of which there are fewer than `most`.
    pub async fn focus_every_control(&self, selector: &str, most: usize) -> usize {
        let visible = "(() => { const style = getComputedStyle(document.activeElement); return style.outlineStyle === 'solid' && parseFloat(style.outlineWidth) >= 2 })()";
        let mut seen = 0;
        loop {
            self.press(TAB).await;
            if !self.is(&format!("document.activeElement.matches({selector:?})")).await {
                return seen;
            }
            let name = self.value("document.activeElement.outerHTML").await;
            assert!(self.is(visible).await, "{name}");
            seen += 1;
            assert!(seen < most, "the focus stays in the page");
        }
    }

    pub async fn close(self) {
        drop(self);
    }

    pub async fn goto(&self, url: &str) {
        self.client.goto(url).await.unwrap();
    }

    /// Returns the value of an expression.
    pub async fn value(&self, expression: &str) -> Value {
        let script = format!("return {expression}");
        self.client.execute(&script, Vec::new()).await.unwrap()
    }

    /// Runs statements.
    pub async fn run(&self, statements: &str) {
        self.client.execute(statements, Vec::new()).await.unwrap();
    }

    pub async fn is(&self, condition: &str) -> bool {
        self.value(&format!("Boolean({condition})")).await == json!(true)
    }

    /// Waits until a condition is true, also on the next page.
    pub async fn wait(&self, condition: &str) {
        self.wait_while(condition, || {}).await;
    }

    /// Calls `work` again and again until a condition is true.
    pub async fn wait_while(&self, condition: &str, mut work: impl FnMut()) {
        let begin = Instant::now();
        let script = format!("try {{ return Boolean({condition}) }} catch {{ return false }}");
        loop {
            work();
            // While the browser changes to another page, it can run no script.
            let result = self.client.execute(&script, Vec::new()).await;
            if matches!(result, Ok(Value::Bool(true))) {
                return;
            }
            if begin.elapsed() > BOUND {
                let page = self.client.source().await.unwrap_or_default();
                panic!("not within {BOUND:?}: {condition} ({result:?})\n{page}");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Presses keys in the element that has the focus.
    pub async fn press(&self, keys: &str) {
        let element = self.client.active_element().await.unwrap();
        element.send_keys(keys).await.unwrap();
    }

    /// Replaces the content of the field that has the focus.
    pub async fn replace(&self, text: &str) {
        self.press(&format!("{HOME}{SHIFT}{END}{SHIFT}{text}")).await;
    }

    /// Presses the tabulator until an element has the focus.
    pub async fn focus_by_tab(&self, selector: &str) {
        self.wait(&format!("document.querySelector({selector:?})")).await;
        for _ in 0..80 {
            if self.is(&format!("document.activeElement.matches({selector:?})")).await {
                return;
            }
            self.press(TAB).await;
        }
        panic!("the tabulator does not reach {selector}");
    }

    /// Sets the width of the page, and light or dark.
    pub async fn appear(&self, width: u32, dark: bool) {
        let phone = width < 600;
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            json!({"width": width, "height": if phone { 740 } else { 1000 }, "deviceScaleFactor": 1, "mobile": phone}),
        );
        let scheme = if dark { "dark" } else { "light" };
        let features = json!([{"name": "prefers-color-scheme", "value": scheme}]);
        self.devtools("Emulation.setEmulatedMedia", json!({"features": features}));
        self.wait(&format!(
            "innerWidth === {width} && matchMedia('(prefers-color-scheme: {scheme})').matches"
        ))
        .await;
        // The charts follow the size of their parts when the browser draws.
        let fits = "[...document.querySelectorAll('.chart')].every((part) => { const plot = part.querySelector('.uplot'); return !plot || Math.abs(plot.clientWidth - part.clientWidth) < 2 })";
        self.wait(fits).await;
    }

    fn devtools(&self, command: &str, parameters: Value) -> Value {
        let body = json!({"cmd": command, "params": parameters});
        self.driver.call("POST", "/goog/cdp/execute", &body).unwrap()
    }

    /// Writes a picture of an element to `build/reports/NAME.png`.
    pub async fn picture(&self, name: &str, element: &str) {
        let area = format!(
            "(() => {{ const area = {element}.getBoundingClientRect(); return [0, area.top + scrollY - 12, innerWidth, area.height + 24] }})()"
        );
        self.capture(name, &area).await;
    }

    /// Writes a picture from the top of an element to the top of another one.
    pub async fn picture_between(&self, name: &str, first: &str, next: &str) {
        let area = format!(
            "(() => {{ const top = (part) => part.getBoundingClientRect().top + scrollY; return [0, top({first}), innerWidth, top({next}) - top({first})] }})()"
        );
        self.capture(name, &area).await;
    }

    async fn capture(&self, name: &str, area: &str) {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../build/reports");
        std::fs::create_dir_all(&folder).unwrap();
        let area = self.value(area).await;
        let clip = json!({"x": area[0], "y": area[1], "width": area[2], "height": area[3], "scale": 1});
        let picture = self.devtools(
            "Page.captureScreenshot",
            json!({"captureBeyondViewport": true, "clip": clip}),
        );
        let bytes = base64(picture["data"].as_str().unwrap());
        std::fs::write(folder.join(format!("{name}.png")), bytes).unwrap();
    }

    /// Returns the elements that make the page scroll sideways.
    pub async fn wider_than_page(&self) -> String {
        let script = "
            const page = document.documentElement;
            if (page.scrollWidth <= page.clientWidth) return '';
            return [...document.body.querySelectorAll('*')]
                .filter((part) => part.getBoundingClientRect().right > page.clientWidth)
                .map((part) => part.outerHTML.slice(0, 120)).join('\\n') || 'unknown';";
        let found = self.client.execute(script, Vec::new()).await.unwrap();
        found.as_str().unwrap().to_owned()
    }

    /// Returns what axe-core finds.
    pub async fn violations(&self) -> String {
        self.run(axe()).await;
        let script = "
            const done = arguments[arguments.length - 1];
            axe.run(document, {resultTypes: ['violations']}).then((result) => done(result.violations.flatMap((found) =>
                found.nodes.map((node) => `${found.id}: ${found.help}: ${node.html.slice(0, 200)} ${node.failureSummary}`)).join('\\n')),
                (error) => done(`axe failed: ${error}`));";
        let found = self.client.execute_async(script, Vec::new()).await.unwrap();
        found.as_str().unwrap().to_owned()
    }

    /// Returns the messages of the browser's console.
    pub fn console(&self) -> Vec<String> {
        let messages = self
            .driver
            .call("POST", "/se/log", &json!({"type": "browser"}))
            .unwrap();
        let text = |message: &Value| message["message"].as_str().unwrap_or_default().to_owned();
        messages.as_array().unwrap().iter().map(text).collect()
    }
}

/// Decodes base64.
fn base64(text: &str) -> Vec<u8> {
    let (mut bytes, mut bits, mut count) = (Vec::with_capacity(text.len() * 3 / 4), 0_u32, 0);
    for digit in text.bytes() {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => continue,
        };
        bits = (bits << 6) | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(((bits >> count) & 0xff) as u8);
        }
    }
    bytes
}

/// Returns the source of axe-core, which npm installs by the `package-lock.json` of p2pmem-web.
fn axe() -> &'static str {
    static SOURCE: OnceLock<String> = OnceLock::new();
    SOURCE.get_or_init(install_axe)
}

fn install_axe() -> String {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../p2pmem-web/web");
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("axe");
    let script = folder.join("node_modules/axe-core/axe.min.js");
    std::fs::create_dir_all(&folder).unwrap();
    // Tests run at the same time, and other processes too.
    let lock = std::fs::File::create(folder.join("lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let read = |folder: &PathBuf| std::fs::read(folder.join("package-lock.json")).unwrap_or_default();
    if read(&folder) != read(&source) || !script.exists() {
        std::fs::copy(source.join("package.json"), folder.join("package.json")).unwrap();
        let locked = folder.join("package-lock.json");
        std::fs::copy(source.join("package-lock.json"), &locked).unwrap();
        let output = Command::new("npm")
            .args(["ci", "--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund"])
            .current_dir(&folder)
            .output()
            .expect("npm is missing (Debian: apt-get install npm)");
        if !output.status.success() {
            std::fs::remove_file(&locked).unwrap();
            panic!("npm failed: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
    std::fs::read_to_string(script).unwrap()
}
