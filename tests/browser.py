"A headless Chromium, driven over a pipe by its own protocol: no driver to install, no port to race for, no network to reach"
import base64, json, os, select, shutil, subprocess
from itertools import count


class Browser:
    "One page at a time: open it, ask it in JavaScript, hear what it complains of"
    def __init__(self, home, width=1280, height=900):
        (down, self.out), (self.inp, up) = os.pipe(), os.pipe()
        flags = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--remote-debugging-pipe', f'--user-data-dir={home}',
                 '--host-resolver-rules=MAP * ~NOTFOUND', f'--window-size={width},{height}', '--hide-scrollbars', '--no-first-run', 'about:blank']
        run = f'exec "$@" 3<&{down} 4>&{up}'
        self.process = subprocess.Popen(['bash', '-c', run, 'bash', shutil.which('chromium'), *flags], pass_fds=(down, up), stderr=subprocess.DEVNULL)
        os.close(down), os.close(up)
        self.ids, self.buffer, self.events, self.session = count(1), b'', [], None
        target = next(t for t in self('Target.getTargets')['targetInfos'] if t['type'] == 'page')
        self.session = self('Target.attachToTarget', targetId=target['targetId'], flatten=True)['sessionId']
        for domain in ('Page', 'Runtime', 'Log', 'Network'): self(f'{domain}.enable')

    def read(self):
        "The next message of the browser"
        while b'\0' not in self.buffer:
            if not select.select([self.inp], [], [], 60)[0]: raise TimeoutError('the browser has been silent for a minute')
            if not (more := os.read(self.inp, 1 << 16)): raise EOFError('the browser is gone')
            self.buffer += more
        message, _, self.buffer = self.buffer.partition(b'\0')
        return json.loads(message)

    def __call__(self, method, **params):
        "Ask, and keep the events that come before the answer"
        ask = dict(id=next(self.ids), method=method, params=params) | ({'sessionId': self.session} if self.session else {})
        os.write(self.out, json.dumps(ask).encode() + b'\0')
        while (said := self.read()).get('id') != ask['id']: self.events.append(said)
        if 'error' in said: raise RuntimeError(f'{method}: {said["error"]["message"]}')
        return said['result']

    def js(self, expression):
        "The value of an expression, promises awaited"
        r = self('Runtime.evaluate', expression=expression, awaitPromise=True, returnByValue=True)
        if 'exceptionDetails' in r: raise RuntimeError(r['exceptionDetails']['exception'].get('description', r))
        return r['result'].get('value')

    def open(self, url):
        "Go there, wait until all is loaded and typeset, and give what went wrong"
        for there in ('about:blank', url):   # a new page even where only the part behind # differs
            self.events.clear()
            self('Page.navigate', url=there)
            while not any(e['method'] == 'Page.loadEventFired' for e in self.events): self.events.append(self.read())
        self.js('window.MathJax?.startup ? MathJax.startup.promise.then(() => 1) : 1')
        return list(self.complaints())

    def complaints(self):
        "Errors and warnings of the console, exceptions, requests that failed or left the disk"
        for e in self.events:
            p = e['params']
            if e['method'] == 'Runtime.consoleAPICalled' and p['type'] in ('error', 'warning', 'assert'): yield f'console: {[a.get("value") for a in p["args"]]}'
            if e['method'] == 'Runtime.exceptionThrown': yield f'exception: {p["exceptionDetails"].get("exception", p["exceptionDetails"])}'
            if e['method'] == 'Log.entryAdded' and p['entry']['level'] in ('error', 'warning'): yield f'log: {p["entry"]["text"]} {p["entry"].get("url", "")}'
            if e['method'] == 'Network.loadingFailed' and not p.get('canceled'): yield f'not loaded: {p["errorText"]} {p["requestId"]}'
            if e['method'] == 'Network.requestWillBeSent' and not p['request']['url'].startswith(('file:', 'data:', 'blob:')): yield f'asked for {p["request"]["url"]}'

    def picture(self, file, width=1280, height=900, mobile=False, full=False):
        "A screenshot"
        self('Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        shot = self('Page.captureScreenshot', captureBeyondViewport=full, **({'clip': dict(x=0, y=0, width=width, height=self.js('document.documentElement.scrollHeight'), scale=1)} if full else {}))
        with open(file, 'wb') as f: f.write(base64.b64decode(shot['data']))

    def close(self):
        self.process.terminate()
        self.process.wait()
        os.close(self.out), os.close(self.inp)
